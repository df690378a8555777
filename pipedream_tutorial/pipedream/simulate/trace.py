"""Write Chrome traces as JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing can open.

A file contains up to two groups of processes: the prediction and the measurement. Each group has
one process per rank, with threads for compute, send and receive. Arrows lead from the sending to
the receiving operation. Counters show held activations and live weight versions. The format is
Google's "Trace Event Format": times are in microseconds, and the slices of a thread are disjoint or
nested.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from pipedream.schedules.ops import Item, Op, Pair, Schedule
from pipedream.schedules.policies import Policy, WeightUse, weight_use
from pipedream.simulate.measures import Steps, held_activations, live_versions
from pipedream.simulate.simulator import Timeline

TraceEvent = dict[str, Any]

# Some viewers treat process 0 as the idle task, so ranks begin at these numbers.
FIRST_PID = {"predicted": 1000, "measured": 2000}
FIRST_TID = {"compute": 0, "send": 100, "receive": 200}


class Slice(NamedTuple):
    """An operation or pair on a rank's compute thread, or the transfer of a result. All slices use
    the same clock."""

    rank: int
    thread: str  # compute, send or receive
    item: Item  # for a transfer: the operation that produced the result
    start_ns: int
    end_ns: int


def trace_document(
    schedule: Schedule,
    *,
    predicted: Timeline | None = None,
    measured: Sequence[Slice] = (),
    policy: Policy,
    batch_size: int,
    unit_s: float | Fraction = 1,
) -> dict[str, Any]:
    """Return a JSON-serializable trace of the prediction, the measurement, or both. `policy` and
    `batch_size` determine weight versions. `batch_size` is the number of microbatches between two
    updates if the policy updates once per batch. `unit_s` is the number of seconds per time unit of
    the simulator. The measured run starts at time 0."""
    groups = {}
    if predicted is not None:
        groups["predicted"] = _predicted_slices(predicted, Fraction(unit_s))
    if measured:
        zero = min(s.start_ns for s in measured)
        groups["measured"] = [
            s._replace(start_ns=s.start_ns - zero, end_ns=s.end_ns - zero) for s in measured
        ]
    use = weight_use(schedule, policy, batch_size)
    events: list[TraceEvent] = []
    early = {}
    for group, slices in groups.items():
        computed = {op: s for s in slices if s.thread == "compute" for op in s.item.parts}
        op_pairs = transfers(schedule)
        early_uses = {b: a for a, b in op_pairs if computed[b].start_ns < computed[a].end_ns}
        early[group] = len(early_uses)
        pid = FIRST_PID[group]
        for rank in range(schedule.num_ranks):
            events += _name_events("process", pid + rank, 0, f"{group} rank {rank}")
        events += _slices(slices, pid, use, early_uses)
        events += _arrows(
            [op_pair for op_pair in op_pairs if op_pair[1] not in early_uses], computed, pid
        )
        times = {op: (s.start_ns, s.end_ns) for op, s in computed.items()}
        held = held_activations(schedule, times)
        events += _counters("held activations (microbatches)", held, pid)
        events += _counters("live weight versions", live_versions(schedule, times, use), pid)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"results used before they were ready": early},
    }


def transfers(schedule: Schedule) -> list[tuple[Op, Op]]:
    """For each result that is sent to another rank, return the sending and the receiving
    operation."""
    ranks = schedule.rank_by_op()
    return [(a, b) for b, a in find_input_ops(schedule).items() if ranks[a] != ranks[b]]


def find_input_ops(schedule: Schedule) -> dict[Op, Op]:
    """Map each operation to the operation that computes its input on another stage. Operations
    without such an input are omitted."""
    pairs = ((op, need) for op in schedule.ops() for need in schedule.needs(op))
    return {op: need for op, need in pairs if need.stage != op.stage}


def _predicted_slices(timeline: Timeline, unit_s: Fraction) -> list[Slice]:
    def ns(time: Fraction) -> int:
        return round(time * unit_s * 10**9)

    slices = [Slice(e.rank, "compute", e.item, ns(e.start), ns(e.end)) for e in timeline.events]
    latency = timeline.costs.communication
    if latency:
        ranks = timeline.schedule.rank_by_op()
        for sender, receiver in transfers(timeline.schedule):
            _, sent = timeline.times[sender]
            transfer = sender, ns(sent), ns(sent + latency)
            slices.append(Slice(ranks[sender], "send", *transfer))
            slices.append(Slice(ranks[receiver], "receive", *transfer))
    return slices


def _name_events(track: str, pid: int, tid: int, name: str) -> list[TraceEvent]:
    """Return the events that set a process's or thread's name and its position in viewers."""
    common = {"ph": "M", "pid": pid, "tid": tid}
    sort_index = pid if track == "process" else tid
    return [
        common | {"name": f"{track}_name", "args": {"name": name}},
        common | {"name": f"{track}_sort_index", "args": {"sort_index": sort_index}},
    ]


def _slices(
    slices: Sequence[Slice], first_pid: int, use: dict[int, WeightUse], early_uses: dict[Op, Op]
) -> Iterator[TraceEvent]:
    """Yield the events of a group's slices. `early_uses` maps an operation to the operation whose
    result it used before the result was ready. Transfers that overlap in time have separate
    threads."""
    free_from: dict[tuple[int, int], list[int]] = defaultdict(list)
    for s in sorted(slices, key=lambda s: (s.start_ns, s.end_ns)):
        pid, tid = first_pid + s.rank, FIRST_TID[s.thread]
        lanes = free_from[pid, tid]
        lane = next((i for i, free in enumerate(lanes) if free <= s.start_ns), len(lanes))
        if lane == len(lanes):
            yield from _name_events(
                "thread", pid, tid + lane, f"{s.thread} {lane + 1}" if lane else s.thread
            )
        lanes[lane : lane + 1] = [s.end_ns]
        computed = s.thread == "compute"
        name = " | ".join(map(str, s.item.parts))
        parts: list[dict[str, Any]] = []
        for op in s.item.parts:
            parts.append(op._asdict())
            if computed and op.kind != "W":  # W reads activations, but no weights
                parts[-1]["weight version"] = use[op.stage].version(op)
        args: dict[str, Any] = {"parts": parts} if isinstance(s.item, Pair) else parts[0]
        unready_inputs = [str(early_uses[op]) for op in s.item.parts if op in early_uses]
        if computed and unready_inputs:
            args["starts before the end of"] = ", ".join(unready_inputs)
        yield {
            "ph": "X",
            "name": name if computed else f"{s.thread} {name}",
            "cat": s.thread,
            "pid": pid,
            "tid": tid + lane,
            "ts": s.start_ns / 1000,
            "dur": (s.end_ns - s.start_ns) / 1000,
            "args": args,
        }


def _arrows(
    op_pairs: Iterable[tuple[Op, Op]], computed: dict[Op, Slice], first_pid: int
) -> Iterator[TraceEvent]:
    """Yield arrows that start inside the sending slice and end inside the receiving slice. Viewers
    attach each end of an arrow to the slice that encloses it."""
    for number, (sender, receiver) in enumerate(op_pairs):
        common = {
            "name": "activation" if sender.kind == "F" else "gradient",
            "cat": "transfer",
            "id": first_pid * 10**6 + number,
            "tid": FIRST_TID["compute"],
        }
        begin, finish = computed[sender], computed[receiver]
        inside = max(begin.start_ns, begin.end_ns - 1) / 1000
        yield common | {"pid": first_pid + begin.rank, "ts": inside, "ph": "s"}
        ts = finish.start_ns / 1000
        yield common | {"pid": first_pid + finish.rank, "ts": ts, "ph": "f", "bp": "e"}


def _counters(name: str, by_rank: list[Steps], first_pid: int) -> Iterator[TraceEvent]:
    for pid, points in enumerate(by_rank, first_pid):
        common = {"ph": "C", "name": name, "pid": pid, "tid": 0}
        for time_ns, count in points:
            yield common | {"args": {"count": float(count)}, "ts": time_ns / 1000}
