"""Chrome trace JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

The prediction and the measurement go into one file as two groups of processes, a process a rank.
Threads are compute, send and receive; arrows lead from the operation that sends to the one that
receives; counters show held activations and live weight versions. The format is Google's "Trace
Event Format": times in microseconds, and slices of one thread are disjoint or nested.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from pipedream.schedules.ops import Item, Op, Pair, Schedule
from pipedream.schedules.policies import Policy, WeightUse, weight_use
from pipedream.simulate.measures import held_activations, live_versions
from pipedream.simulate.simulator import Timeline

TraceEvent = dict[str, Any]

# Process 0 is the idle task to some viewers, so ranks are counted from here on.
FIRST_PID = {"predicted": 1000, "measured": 2000}
FIRST_TID = {"compute": 0, "send": 100, "receive": 200}


class Slice(NamedTuple):
    """An operation or a pair on a rank's compute thread, or a result on its way; on one clock."""

    rank: int
    thread: str  # compute, send or receive
    item: Item  # on both ends of its way: the operation that gave the result
    start_ns: int
    end_ns: int
    lane: int = 0  # of its thread: where transfers overlap in time, each has its own


class _Run:
    """One group of processes: what ran, and when."""

    def __init__(self, group: str, schedule: Schedule, slices: Iterable[Slice]) -> None:
        self.first_pid = FIRST_PID[group]
        self.group = group
        self.schedule = schedule
        free_from: dict[tuple[int, str], list[int]] = defaultdict(list)
        self.slices: list[Slice] = []
        for s in sorted(slices, key=lambda s: (s.start_ns, s.end_ns)):
            lanes = free_from[s.rank, s.thread]
            lane = next((i for i, free in enumerate(lanes) if free <= s.start_ns), len(lanes))
            lanes[lane : lane + 1] = [s.end_ns]
            self.slices.append(s._replace(lane=lane))
        self.at = {op: s for s in self.slices if s.thread == "compute" for op in s.item.parts}
        self.transfers = transfers(schedule)
        self.impossible = {
            receiver: sender
            for sender, receiver in self.transfers
            if self.at[receiver].start_ns < self.at[sender].end_ns
        }
        """operation -> the one whose result it used before it was there"""


def trace_document(
    schedule: Schedule,
    *,
    predicted: Timeline | None = None,
    measured: Sequence[Slice] = (),
    policy: Policy,
    batch_size: int,
    unit_s: float | Fraction = 1,
) -> dict[str, Any]:
    """A trace of how the schedule ran, with the groups that are given, as JSON's object.

    `policy` and `batch_size`, microbatches between two updates where it updates once a batch, give
    weight versions; `unit_s`: seconds a unit of the simulator. The measured run starts at time 0.
    """
    runs = []
    if predicted is not None:
        runs.append(_Run("predicted", schedule, _predicted_slices(predicted, Fraction(unit_s))))
    if measured:
        zero = min(s.start_ns for s in measured)
        moved = [s._replace(start_ns=s.start_ns - zero, end_ns=s.end_ns - zero) for s in measured]
        runs.append(_Run("measured", schedule, moved))
    use = weight_use(schedule, policy, batch_size)
    events: list[TraceEvent] = []
    for run in runs:
        events += [*_metadata(run), *_slices(run, use), *_arrows(run), *_counters(run, use)]
    backwards = {run.group: len(run.impossible) for run in runs}
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"results used before they were there": backwards},
    }


def transfers(schedule: Schedule) -> list[tuple[Op, Op]]:
    """(operation that sends, operation that receives) for each result that leaves its rank."""
    ranks = schedule.ranks()
    return [(a, b) for b, a in handed_on(schedule).items() if ranks[a] != ranks[b]]


def handed_on(schedule: Schedule) -> dict[Op, Op]:
    """operation -> the one of another stage whose result it takes in."""
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


def _metadata(run: _Run) -> Iterable[TraceEvent]:
    """Names of processes and threads, and the order in which viewers show them."""
    ranks = range(run.schedule.num_ranks)
    named = [("process", run.first_pid + rank, 0, f"{run.group} rank {rank}") for rank in ranks]
    for rank, thread, lane in sorted({(s.rank, s.thread, s.lane) for s in run.slices}):
        name = thread if lane == 0 else f"{thread} {lane + 1}"
        named.append(("thread", run.first_pid + rank, FIRST_TID[thread] + lane, name))
    for what, pid, tid, name in named:
        at = {"ph": "M", "pid": pid, "tid": tid}
        place = pid if what == "process" else tid
        yield at | {"name": f"{what}_name", "args": {"name": name}}
        yield at | {"name": f"{what}_sort_index", "args": {"sort_index": place}}


def _slices(run: _Run, use: dict[int, WeightUse]) -> Iterable[TraceEvent]:
    for s in run.slices:
        computed = s.thread == "compute"
        name = " | ".join(map(str, s.item.parts))
        parts: list[dict[str, Any]] = []
        for op in s.item.parts:
            parts.append(op._asdict())
            if computed and op.kind != "W":  # W reads activations, no weights
                parts[-1]["weight version"] = use[op.stage].version(op)
        args: dict[str, Any] = {"parts": parts} if isinstance(s.item, Pair) else parts[0]
        late = [str(run.impossible[op]) for op in s.item.parts if op in run.impossible]
        if computed and late:
            args["starts before the end of"] = ", ".join(late)
        yield {
            "ph": "X",
            "name": name if computed else f"{s.thread} {name}",
            "cat": s.thread,
            "pid": run.first_pid + s.rank,
            "tid": FIRST_TID[s.thread] + s.lane,
            "ts": s.start_ns / 1000,
            "dur": (s.end_ns - s.start_ns) / 1000,
            "args": args,
        }


def _arrows(run: _Run) -> Iterable[TraceEvent]:
    """From inside the slice that sends to inside the one that receives: viewers bind an arrow's
    ends to the slices that enclose them. A result used before it was there gets no arrow."""
    for number, (sender, receiver) in enumerate(run.transfers):
        if receiver in run.impossible:
            continue
        shared = {
            "name": "activation" if sender.kind == "F" else "gradient",
            "cat": "transfer",
            "id": run.first_pid * 10**6 + number,
            "tid": FIRST_TID["compute"],
        }
        begin = run.at[sender]
        finish = run.at[receiver]
        inside = max(begin.start_ns, begin.end_ns - 1) / 1000
        yield shared | {"pid": run.first_pid + begin.rank, "ts": inside, "ph": "s"}
        ts = finish.start_ns / 1000
        yield shared | {"pid": run.first_pid + finish.rank, "ts": ts, "ph": "f", "bp": "e"}


def _counters(run: _Run, use: dict[int, WeightUse]) -> Iterable[TraceEvent]:
    times = {op: (s.start_ns, s.end_ns) for op, s in run.at.items()}
    series = {"held activations (microbatches)": held_activations(run.schedule, times)}
    series["live weight versions"] = live_versions(run.schedule, times, use)
    for name, by_rank in series.items():
        for rank, points in by_rank.items():
            at = {"ph": "C", "name": name, "pid": run.first_pid + rank, "tid": 0}
            for time_ns, count in points:
                yield at | {"args": {"count": float(count)}, "ts": time_ns / 1000}
