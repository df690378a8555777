"""Chrome trace JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

The prediction and the measurement go into one file as two groups of processes, a process a rank.
Threads are compute, send and receive; arrows lead from the operation that sends to the one that
receives; counters show held activations and live weight versions. The format is Google's "Trace
Event Format": times in microseconds, and slices of one thread are disjoint or nested.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from pipedream.schedules.ops import FORWARD, WEIGHT_GRADIENT, Item, Op, Pair, Schedule
from pipedream.schedules.policies import Policy, WeightUse, weight_use
from pipedream.simulate.measures import held_activations, live_versions
from pipedream.simulate.simulator import Needs, Timeline

TraceEvent = dict[str, Any]

# Process 0 is the idle task to some viewers, so ranks are counted from here on.
FIRST_PID = {"predicted": 1000, "measured": 2000}
FIRST_TID = {"compute": 0, "send": 100, "receive": 200}


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredEvent:
    """One interval of a real run, on a clock that all ranks share."""

    rank: int
    kind: str
    """F, B, I or W. On the threads send and receive: that of the operation whose result travels."""
    stage: int
    """The stage of that operation; so both ends of a transfer carry the sender's stage."""
    microbatch: int
    start_ns: int
    end_ns: int
    thread: str
    """compute, send or receive."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Slice:
    """An operation or a pair on a rank's compute thread, or a result on its way."""

    rank: int
    thread: str
    item: Item
    start_ns: int
    end_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """One group of processes: what ran, and the orders that it makes up."""

    group: str
    schedule: Schedule
    slices: list[_Slice]


def trace_document(
    *,
    predicted: Timeline | None = None,
    measured: Sequence[MeasuredEvent] | None = None,
    policy: Policy | None = None,
    batch_size: int | None = None,
    unit_s: float | Fraction = 1,
) -> dict[str, Any]:
    """A trace with the groups that are given, as the object that JSON is made of.

    `policy` and `batch_size` (microbatches between two updates where the policy updates once a
    batch; all of them by default) give weight versions; without a policy none are shown.
    `unit_s` is the length of one simulator unit in seconds. The measured run starts at time 0.
    """
    runs = []
    if predicted is not None:
        runs.append(_predicted_run(predicted, Fraction(unit_s)))
    if measured:
        runs.append(_measured_run(measured))
    events: list[TraceEvent] = []
    for run in runs:
        use = None
        if policy is not None:
            size = batch_size if batch_size is not None else run.schedule.num_microbatches
            use = weight_use(run.schedule, policy, size)
        events += [*_metadata(run), *_slices(run, use), *_arrows(run), *_counters(run, use)]
    backwards = {run.group: len(_impossible(run)) for run in runs}
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"results used before they were there": backwards},
    }


def transfers(schedule: Schedule) -> list[tuple[Op, Op]]:
    """(operation that sends, operation that receives) for each result that leaves its rank."""
    ranks = schedule.ranks()
    return [(a, b) for a, b in handed_on(schedule) if ranks[a] != ranks[b]]


def handed_on(schedule: Schedule) -> list[tuple[Op, Op]]:
    """(operation that gives, operation that takes) for each result that another stage takes in."""
    wanted = Needs(schedule)
    return [
        (need, op)
        for op in schedule.ops()
        for need in wanted.of(op)
        if need.stage != op.stage and need in wanted.known
    ]


def _predicted_run(timeline: Timeline, unit_s: Fraction) -> _Run:
    def ns(time: Fraction) -> int:
        return round(time * unit_s * 10**9)

    slices = [
        _Slice(rank=e.rank, thread="compute", item=e.item, start_ns=ns(e.start), end_ns=ns(e.end))
        for e in timeline.all_events()
    ]
    latency = timeline.costs.communication
    if latency > 0:
        ranks = timeline.schedule.ranks()
        ends = {op: e.end for e in timeline.all_events() for op in e.item.parts}
        for sender, receiver in transfers(timeline.schedule):
            start, end = ns(ends[sender]), ns(ends[sender] + latency)
            slices += [
                _Slice(rank=ranks[op], thread=thread, item=sender, start_ns=start, end_ns=end)
                for op, thread in ((sender, "send"), (receiver, "receive"))
            ]
    return _Run(group="predicted", schedule=timeline.schedule, slices=slices)


def _measured_run(measured: Sequence[MeasuredEvent]) -> _Run:
    zero = min(event.start_ns for event in measured)
    slices = []
    for e in sorted(measured, key=lambda e: (e.start_ns, e.end_ns)):
        slices.append(
            _Slice(
                rank=e.rank,
                thread=e.thread,
                item=Op(e.kind, e.stage, e.microbatch),
                start_ns=e.start_ns - zero,
                end_ns=e.end_ns - zero,
            )
        )
    computed = [s for s in slices if s.thread == "compute"]
    num_ranks = 1 + max(s.rank for s in slices)
    orders = tuple(tuple(s.item for s in computed if s.rank == r) for r in range(num_ranks))
    stages = tuple(sorted({op.stage for s in computed for op in s.item.parts}))
    schedule = Schedule(
        name="measured",
        orders=orders,
        chains=(stages,),
        stages_per_rank=max(1, len(stages) // num_ranks),
    )
    return _Run(group="measured", schedule=schedule, slices=slices)


def _computed(run: _Run) -> dict[Op, _Slice]:
    return {op: s for s in run.slices if s.thread == "compute" for op in s.item.parts}


def _impossible(run: _Run) -> list[tuple[Op, Op]]:
    at = _computed(run)
    return [(a, b) for a, b in transfers(run.schedule) if at[b].start_ns < at[a].end_ns]


def _metadata(run: _Run) -> Iterable[TraceEvent]:
    """Names of processes and threads, and the order in which viewers show them."""
    for rank in range(run.schedule.num_ranks):
        pid = FIRST_PID[run.group] + rank
        yield from _named("process", pid, 0, f"{run.group} rank {rank}", pid)
    for rank, thread, lane in sorted({(s.rank, s.thread, lane) for s, lane in _laned(run)}):
        tid = FIRST_TID[thread] + lane
        name = thread if lane == 0 else f"{thread} {lane + 1}"
        yield from _named("thread", FIRST_PID[run.group] + rank, tid, name, tid)


def _named(what: str, pid: int, tid: int, name: str, place: int) -> Iterable[TraceEvent]:
    at = {"ph": "M", "pid": pid, "tid": tid}
    yield at | {"name": f"{what}_name", "args": {"name": name}}
    yield at | {"name": f"{what}_sort_index", "args": {"sort_index": place}}


def _laned(run: _Run) -> list[tuple[_Slice, int]]:
    """Slices with the thread's lane: where transfers overlap in time, each gets its own."""
    free_from: dict[tuple[int, str], list[int]] = {}
    placed = []
    for s in sorted(run.slices, key=lambda s: (s.start_ns, s.end_ns)):
        lanes = free_from.setdefault((s.rank, s.thread), [])
        lane = next((i for i, free in enumerate(lanes) if free <= s.start_ns), len(lanes))
        lanes[lane : lane + 1] = [s.end_ns]
        placed.append((s, lane))
    return placed


def _slices(run: _Run, use: dict[int, WeightUse] | None) -> Iterable[TraceEvent]:
    late = {receiver: sender for sender, receiver in _impossible(run)}
    for s, lane in _laned(run):
        parts = [_arguments(op, use if s.thread == "compute" else None) for op in s.item.parts]
        args: dict[str, Any] = {"parts": parts} if isinstance(s.item, Pair) else parts[0]
        early = [late[op] for op in s.item.parts if s.thread == "compute" and op in late]
        if early:
            args["starts before the end of"] = ", ".join(map(str, early))
        name = " | ".join(map(str, s.item.parts))
        yield {
            "ph": "X",
            "name": name if s.thread == "compute" else f"{s.thread} {name}",
            "cat": s.thread,
            "pid": FIRST_PID[run.group] + s.rank,
            "tid": FIRST_TID[s.thread] + lane,
            "ts": s.start_ns / 1000,
            "dur": (s.end_ns - s.start_ns) / 1000,
            "args": args,
        }


def _arguments(op: Op, use: dict[int, WeightUse] | None) -> dict[str, Any]:
    args: dict[str, Any] = {"kind": op.kind, "stage": op.stage, "microbatch": op.microbatch}
    if use is not None and op.kind != WEIGHT_GRADIENT:  # W reads activations, no weights
        versions = use[op.stage].forward if op.kind == FORWARD else use[op.stage].backward
        args["weight version"] = versions[op.microbatch]
    return args


def _arrows(run: _Run) -> Iterable[TraceEvent]:
    """From inside the slice that sends to inside the one that receives: viewers bind an arrow's
    ends to the slices that enclose them. A result used before it was there gets no arrow."""
    at, impossible = _computed(run), set(_impossible(run))
    for number, (sender, receiver) in enumerate(transfers(run.schedule)):
        if (sender, receiver) in impossible:
            continue
        begin, finish = at[sender], at[receiver]
        shared = {
            "name": "activation" if sender.kind == FORWARD else "gradient",
            "cat": "transfer",
            "id": FIRST_PID[run.group] * 10**6 + number,
        }
        inside = max(begin.start_ns, begin.end_ns - 1)
        yield shared | _place(run, begin.rank, inside) | {"ph": "s"}
        yield shared | _place(run, finish.rank, finish.start_ns) | {"ph": "f", "bp": "e"}


def _place(run: _Run, rank: int, time_ns: int) -> TraceEvent:
    pid = FIRST_PID[run.group] + rank
    return {"pid": pid, "tid": FIRST_TID["compute"], "ts": time_ns / 1000}


def _counters(run: _Run, use: dict[int, WeightUse] | None) -> Iterable[TraceEvent]:
    times = {op: (s.start_ns, s.end_ns) for op, s in _computed(run).items()}
    series = {"held activations (microbatches)": held_activations(run.schedule, times, 0)}
    if use is not None:
        series["live weight versions"] = live_versions(run.schedule, times, 0, use)
    for name, by_rank in series.items():
        for rank, points in by_rank.items():
            pid = FIRST_PID[run.group] + rank
            for time_ns, count in points:
                value = {"ph": "C", "name": name, "args": {"count": float(count)}}
                yield value | {"pid": pid, "tid": 0, "ts": time_ns / 1000}
