"""Write Chrome traces as JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A file has the prediction and the measurement as two groups of processes, with one process per rank.
The threads are compute, send and receive. Arrows lead from the sending to the receiving operation.
Counters show held activations and live weight versions. The format is Google's "Trace Event
Format": times are in microseconds, and slices of one thread are disjoint or nested.
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
    updates if the policy updates once per batch. `unit_s` is the number of seconds per unit of the
    simulator. The measured run starts at time 0."""
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
        at = {op: s for s in slices if s.thread == "compute" for op in s.item.parts}
        ways = transfers(schedule)
        too_soon = {b: a for a, b in ways if at[b].start_ns < at[a].end_ns}
        early[group] = len(too_soon)
        pid = FIRST_PID[group]
        for rank in range(schedule.num_ranks):
            events += _named("process", pid + rank, 0, f"{group} rank {rank}")
        events += _slices(slices, pid, use, too_soon)
        events += _arrows([way for way in ways if way[1] not in too_soon], at, pid)
        times = {op: (s.start_ns, s.end_ns) for op, s in at.items()}
        held = held_activations(schedule, times)
        events += _counters("held activations (microbatches)", held, pid)
        events += _counters("live weight versions", live_versions(schedule, times, use), pid)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"results used before they were ready": early},
    }


def transfers(schedule: Schedule) -> list[tuple[Op, Op]]:
    """Return (sending operation, receiving operation) for each result that leaves its rank."""
    ranks = schedule.ranks()
    return [(a, b) for b, a in handed_on(schedule).items() if ranks[a] != ranks[b]]


def handed_on(schedule: Schedule) -> dict[Op, Op]:
    """Map each operation to the operation of another stage whose result it uses."""
    pairs = ((op, need) for op in schedule.ops() for need in schedule.needs(op))
    return {op: need for op, need in pairs if need.stage != op.stage}


def _predicted_slices(timeline: Timeline, unit_s: Fraction) -> list[Slice]:
    def ns(time: Fraction) -> int:
        return round(time * unit_s * 10**9)

    slices = [Slice(e.rank, "compute", e.item, ns(e.start), ns(e.end)) for e in timeline.events]
    latency = timeline.costs.communication
    if latency:
        ranks = timeline.schedule.ranks()
        for sender, receiver in transfers(timeline.schedule):
            _, sent = timeline.times[sender]
            way = sender, ns(sent), ns(sent + latency)
            slices.append(Slice(ranks[sender], "send", *way))
            slices.append(Slice(ranks[receiver], "receive", *way))
    return slices


def _named(what: str, pid: int, tid: int, name: str) -> list[TraceEvent]:
    """Return the events that set a process's or thread's name and its position in viewers."""
    at = {"ph": "M", "pid": pid, "tid": tid}
    sort_index = pid if what == "process" else tid
    return [
        at | {"name": f"{what}_name", "args": {"name": name}},
        at | {"name": f"{what}_sort_index", "args": {"sort_index": sort_index}},
    ]


def _slices(
    slices: Sequence[Slice], first_pid: int, use: dict[int, WeightUse], too_soon: dict[Op, Op]
) -> Iterator[TraceEvent]:
    """Yield the events of a group's slices. `too_soon` maps an operation to the operation whose
    result it used before the result was ready. Transfers that overlap in time have separate
    threads."""
    free_from: dict[tuple[int, int], list[int]] = defaultdict(list)
    for s in sorted(slices, key=lambda s: (s.start_ns, s.end_ns)):
        pid, tid = first_pid + s.rank, FIRST_TID[s.thread]
        lanes = free_from[pid, tid]
        lane = next((i for i, free in enumerate(lanes) if free <= s.start_ns), len(lanes))
        if lane == len(lanes):
            yield from _named(
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
        late = [str(too_soon[op]) for op in s.item.parts if op in too_soon]
        if computed and late:
            args["starts before the end of"] = ", ".join(late)
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
    ways: Iterable[tuple[Op, Op]], at: dict[Op, Slice], first_pid: int
) -> Iterator[TraceEvent]:
    """Yield arrows from the inside of the sending slice to the inside of the receiving slice.
    Viewers attach each end of an arrow to the slice that encloses it."""
    for number, (sender, receiver) in enumerate(ways):
        shared = {
            "name": "activation" if sender.kind == "F" else "gradient",
            "cat": "transfer",
            "id": first_pid * 10**6 + number,
            "tid": FIRST_TID["compute"],
        }
        begin, finish = at[sender], at[receiver]
        inside = max(begin.start_ns, begin.end_ns - 1) / 1000
        yield shared | {"pid": first_pid + begin.rank, "ts": inside, "ph": "s"}
        ts = finish.start_ns / 1000
        yield shared | {"pid": first_pid + finish.rank, "ts": ts, "ph": "f", "bp": "e"}


def _counters(name: str, by_rank: list[Steps], first_pid: int) -> Iterator[TraceEvent]:
    for pid, points in enumerate(by_rank, first_pid):
        at = {"ph": "C", "name": name, "pid": pid, "tid": 0}
        for time_ns, count in points:
            yield at | {"args": {"count": float(count)}, "ts": time_ns / 1000}
