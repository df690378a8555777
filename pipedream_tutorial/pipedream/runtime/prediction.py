"""From one measured run to the times of others: the simulator, fed with measured durations.

Imports no torch. Times of the simulator are nanoseconds here, kept as exact fractions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from statistics import median
from typing import Any

from pipedream.schedules.ops import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Op, Schedule
from pipedream.schedules.policies import Policy
from pipedream.simulate.comparison import stage_factors
from pipedream.simulate.simulator import Costs, Timeline, simulate
from pipedream.simulate.trace import MeasuredEvent, transfers


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One schedule at one number of microbatches."""

    name: str
    """Key of SCHEDULES, the path of a CSV, or FOUND and the memory of a search."""
    num_microbatches: int
    """In a batch."""
    num_batches: int
    schedule: Schedule
    """Orders over all batches."""
    policy: Policy
    memory: int | None = None
    """Of an order that is still to be found: microbatches that a rank may hold. Until then
    `schedule` is 1F1B, which has the same stages and neighbours."""


@dataclass(kw_only=True, slots=True, eq=False)
class MeasuredRun:
    """A case, run for real. Of several repeats: the one whose makespan is the median."""

    case: Case
    events: Sequence[MeasuredEvent]
    repeat_makespans_ns: Sequence[int]
    peak_versions: Sequence[int]
    """By stage: most weight versions that it kept at a time."""
    losses: Sequence[float]
    """Mean loss of each batch."""
    peak_memory_bytes: Sequence[int] | None = None
    """By rank, as the GPU's allocator counted them; None on a CPU."""
    waited_for_host: Sequence[float] | None = None
    """By rank: share of its operations that ended as soon as they were handed to the GPU, which so
    waited for the host; None on a CPU."""
    weights: list[Any] = field(default_factory=list)
    """By stage, of the last repeat, where they were asked for."""
    weights_equal: bool | None = None
    """Whether they are those of the one-process run bit for bit; None: not checked."""


def compute_events(events: Sequence[MeasuredEvent]) -> dict[Op, MeasuredEvent]:
    """operation -> when it was computed."""
    return {Op(e.kind, e.stage, e.microbatch): e for e in events if e.thread == "compute"}


def makespan_ns(events: Sequence[MeasuredEvent]) -> int:
    """From the start of the first operation on any stage to the end of the last one."""
    computed = compute_events(events).values()
    return max(e.end_ns for e in computed) - min(e.start_ns for e in computed)


def utilisation(events: Sequence[MeasuredEvent], num_stages: int) -> Fraction:
    """Share of all stages' time within the makespan that is computing, 0 to 1."""
    busy = sum(e.end_ns - e.start_ns for e in compute_events(events).values())
    return Fraction(busy, num_stages * makespan_ns(events))


def durations_ns(events: Sequence[MeasuredEvent]) -> dict[tuple[int, str], list[int]]:
    """(stage, kind) -> how long each such operation took."""
    found: dict[tuple[int, str], list[int]] = {}
    for op, event in compute_events(events).items():
        found.setdefault((op.stage, op.kind), []).append(event.end_ns - event.start_ns)
    return found


def communication_ns(events: Sequence[MeasuredEvent], schedule: Schedule) -> Fraction:
    """Median time from the end of an operation to the start of the one that takes its result in,
    over those receivers that had nothing else to do: whose stage had ended its operation before by
    the time the result was made. 0 if there was none.
    """
    at = compute_events(events)
    before: dict[Op, Op | None] = {}
    for order in schedule.orders:
        previous = None
        for op in (op for item in order for op in item.parts):
            before[op], previous = previous, op
    gaps = []
    for sender, receiver in transfers(schedule):
        own = before[receiver]
        if own is None or at[own].end_ns <= at[sender].end_ns:
            gaps.append(Fraction(at[receiver].start_ns - at[sender].end_ns))
    return max(Fraction(0), median(gaps)) if gaps else Fraction(0)


def calibrate(events: Sequence[MeasuredEvent], schedule: Schedule) -> Costs:
    """Mean durations by stage and the time to send, from a measured run.

    Where the run did not cut its backward passes, all of one counts as its input gradient: such
    costs predict schedules with whole backward passes only.
    """
    found = durations_ns(events)

    def means(*kinds: str) -> tuple[Fraction, ...]:
        lists = [
            [ns for kind in kinds for ns in found.get((stage, kind), [])]
            for stage in schedule.chains[0]
        ]
        return tuple(Fraction(sum(ns), len(ns)) if ns else Fraction(0) for ns in lists)

    return Costs(
        forward=means(FORWARD),
        input_gradient=means(BACKWARD, INPUT_GRADIENT),
        weight_gradient=means(WEIGHT_GRADIENT),
        communication=communication_ns(events, schedule),
    )


def can_predict(calibrated_on: Schedule, other: Schedule) -> bool:
    """Whether durations of `calibrated_on` tell those of `other`: not if only one of them cuts its
    backward passes, for where the cut lies in a whole one has not been measured."""
    return calibrated_on.cuts_backward or not other.cuts_backward


def predict(schedule: Schedule, costs: Costs) -> Timeline:
    """The orders in the simulator with calibrated costs; where the schedule has other stages than
    they are of, each gets its share of the layers."""
    return simulate(schedule, recut(costs, len(schedule.chains[0])))


def recut(costs: Costs, num_stages: int) -> Costs:
    """Costs of the same layers cut into so many equal stages."""

    def each(durations: tuple[Fraction, ...]) -> tuple[Fraction, ...]:
        share = Fraction(len(durations), num_stages)
        return tuple(share * mean for mean in stage_factors(durations, num_stages))

    return replace(
        costs,
        forward=each(costs.forward),
        input_gradient=each(costs.input_gradient),
        weight_gradient=each(costs.weight_gradient),
    )


def received_before_sent(events: Sequence[MeasuredEvent]) -> list[Op]:
    """Operations whose result had been received before its sending began: none, if the stages'
    clocks agree."""
    sent = {Op(e.kind, e.stage, e.microbatch): e.start_ns for e in events if e.thread == "send"}
    received = {
        Op(e.kind, e.stage, e.microbatch): e.end_ns for e in events if e.thread == "receive"
    }
    return [op for op, end in received.items() if op in sent and end < sent[op]]
