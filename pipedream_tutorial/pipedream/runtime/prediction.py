"""From one measured run to the times of others: the simulator, fed with measured durations.

Imports no torch. Times of the simulator are nanoseconds here, kept as exact fractions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import Any

from pipedream.schedules.ops import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Op, Schedule
from pipedream.schedules.policies import Policy
from pipedream.simulate.comparison import stage_factors
from pipedream.simulate.simulator import Costs, Timeline, simulate
from pipedream.simulate.trace import MeasuredEvent, transfers

Events = Sequence[MeasuredEvent]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One schedule at one number of microbatches."""

    name: str
    """Key of SCHEDULES, the path of a CSV, or FOUND and the memory of a search."""
    num_microbatches: int
    """In a batch."""
    schedule: Schedule
    """Orders over all batches. Before a search 1F1B's, which has the same stages and neighbours."""
    policy: Policy
    memory: int | None = None
    """Of an order that is still to be found: microbatches that a rank may hold."""


@dataclass(kw_only=True, eq=False)
class MeasuredRun:
    """A case, run for real. Of several repeats: the one whose makespan is the median."""

    case: Case
    events: Events
    measured: dict[str, Any]
    """What a record says of it."""
    weights: Sequence[Any] = ()
    """By stage, of the last repeat, where they were asked for."""

    @cached_property
    def costs(self) -> Costs:
        return calibrate(self.events, self.case.schedule)


def by_operation(events: Events, thread: str = "compute") -> dict[Op, MeasuredEvent]:
    """operation -> when it was computed, or its result was sent or received."""
    return {Op(e.kind, e.stage, e.microbatch): e for e in events if e.thread == thread}


def makespan_ns(events: Events) -> int:
    """From the start of the first operation on any stage to the end of the last one."""
    computed = by_operation(events).values()
    return max(e.end_ns for e in computed) - min(e.start_ns for e in computed)


def durations_ns(events: Events) -> dict[tuple[int, str], list[int]]:
    """(stage, kind) -> how long each such operation took."""
    found: dict[tuple[int, str], list[int]] = {}
    for op, event in by_operation(events).items():
        found.setdefault((op.stage, op.kind), []).append(event.end_ns - event.start_ns)
    return found


def communication_ns(events: Events, schedule: Schedule) -> Fraction:
    """Median time from the end of an operation to the start of the one that takes its result in,
    over those receivers that had nothing else to do: whose stage had ended its operation before by
    the time the result was made. 0 if there was none.
    """
    at = by_operation(events)
    before = {op: previous for order in schedule.flat for previous, op in pairwise(order)}
    gaps = [
        Fraction(at[receiver].start_ns - at[sender].end_ns)
        for sender, receiver in transfers(schedule)
        if receiver not in before or at[before[receiver]].end_ns <= at[sender].end_ns
    ]
    return max(Fraction(0), median(gaps)) if gaps else Fraction(0)


def calibrate(events: Events, schedule: Schedule) -> Costs:
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


def predict(schedule: Schedule, measured: MeasuredRun) -> Timeline | None:
    """The orders in the simulator, with durations of a measured run. None where they cut backward
    passes that the run did not cut: where the cut lies was not measured."""
    if schedule.cuts_backward and not measured.case.schedule.cuts_backward:
        return None
    return simulate(schedule, recut(measured.costs, len(schedule.chains[0])))


def recut(costs: Costs, num_stages: int) -> Costs:
    """Costs of the same layers cut into so many equal stages: each gets its share of them."""
    share = Fraction(len(costs.forward), num_stages)

    def each(durations: tuple[Fraction, ...]) -> tuple[Fraction, ...]:
        return tuple(share * mean for mean in stage_factors(durations, num_stages))

    return replace(
        costs,
        forward=each(costs.forward),
        input_gradient=each(costs.input_gradient),
        weight_gradient=each(costs.weight_gradient),
    )


def received_before_sent(events: Events) -> list[Op]:
    """Operations whose result had been received before its sending began: none, if the stages'
    clocks agree."""
    sent = by_operation(events, "send")
    received = by_operation(events, "receive").items()
    return [op for op, event in received if op in sent and event.end_ns < sent[op].start_ns]
