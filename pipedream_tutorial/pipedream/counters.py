"""What a rank holds at every moment: activations and weight versions, for traces and pictures.

Times may be a simulator's fractions or a clock's nanoseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TypeVar

from pipedream.measures import activation_steps
from pipedream.ops import FORWARD, Op, Schedule
from pipedream.policies import WeightUse
from pipedream.simulator import Timeline

Time = TypeVar("Time", int, Fraction)


def times_of(timeline: Timeline) -> dict[Op, tuple[Fraction, Fraction]]:
    """Start and end of every operation; those of a pair have the pair's."""
    return {op: (e.start, e.end) for e in timeline.all_events() for op in e.item.parts}


def held_activations(
    schedule: Schedule, times: Mapping[Op, tuple[Time, Time]], zero: Time
) -> dict[int, list[tuple[Time, Fraction]]]:
    """rank -> (time, activations held from then on), in microbatches of a rank's whole share.

    Counted from the start of a forward pass to the end of the pass that frees them.
    """
    v = schedule.stages_per_rank
    found = {}
    for rank, steps in activation_steps(schedule).items():
        points = [(zero, Fraction(0))]
        for op, count in steps:
            start, end = times[op]
            points.append((start if op.kind == FORWARD else end, Fraction(count, v)))
        found[rank] = _changes(points)
    return found


def live_versions(
    schedule: Schedule,
    times: Mapping[Op, tuple[Time, Time]],
    zero: Time,
    use: Mapping[int, WeightUse],
) -> dict[int, list[tuple[Time, Fraction]]]:
    """rank -> (time, weight versions kept from then on), in copies of a rank's whole share.

    Every stage starts with one version; an operation changes their number when it ends.
    """
    v = schedule.stages_per_rank
    found = {}
    for rank, order in enumerate(schedule.orders):
        ops = [op for item in order for op in item.parts]
        kept = {op.stage: 1 for op in ops}
        after = {op: count for stage in kept for op, count in use[stage].live}
        points = [(zero, Fraction(len(kept), v))]
        for op in ops:
            kept[op.stage] = after[op]
            points.append((times[op][1], Fraction(sum(kept.values()), v)))
        found[rank] = _changes(points)
    return found


def _changes(points: Sequence[tuple[Time, Fraction]]) -> list[tuple[Time, Fraction]]:
    """Only where the value changes; of several points at one time the last."""
    found: list[tuple[Time, Fraction]] = []
    for time, value in dict(points).items():
        if not found or found[-1][1] != value:
            found.append((time, value))
    return found
