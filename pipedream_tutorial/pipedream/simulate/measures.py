"""Compute the costs of a timeline: idle time, activations and weight versions."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import pipedream_simple as simple

from pipedream.schedules.ops import Op, Schedule
from pipedream.simulate.simulator import Timeline


class Idle(NamedTuple):
    """Idle time of each rank under the two definitions that papers use."""

    makespan: tuple[Fraction, ...]  # from time 0 to the end of the last rank, minus the rank's work
    span: tuple[Fraction, ...]  # from a rank's first start to its last end; 0 means zero bubble
    makespan_fraction: Fraction  # idle share of all ranks' time, 0 to 1; utilization is the rest
    span_fraction: Fraction  # idle share of the ranks' spans, 0 to 1


def idle(timeline: Timeline, last_ends: Sequence[int] = (), count: int = 1) -> Idle:
    """Return the idle time of a timeline, or of `count` consecutive repetitions of the timeline.
    `last_ends` contains the tick at which each rank ends the last repetition. Ranks without
    operations are always idle."""
    last_ends = last_ends or [ends[-1] if ends else 0 for ends in timeline.ends]
    total = max(last_ends)
    tick = timeline.tick
    lines = list(zip(timeline.starts, timeline.ends, last_ends, strict=True))
    busy = [count * (sum(ends) - sum(starts)) for starts, ends, _ in lines]
    spans = [end - starts[0] if starts else total for starts, _, end in lines]
    return Idle(
        makespan=tuple((total - b) * tick for b in busy),
        span=tuple((s - b) * tick for s, b in zip(spans, busy, strict=True)),
        makespan_fraction=1 - Fraction(sum(busy), total * len(busy)),
        span_fraction=1 - Fraction(sum(busy), sum(spans)),
    )


CHANGES = {"F": (1, 0), "I": (0, 0), "W": (0, -1), "B": (0, -1)}
"""Kind of operation -> changes in the held activations when the operation starts and when it ends.
The unit is the activations of one microbatch on one stage. With v stages per rank, each stage holds
1/v of the activations of all of the rank's layers."""


def peak_activations(schedule: Schedule) -> tuple[Fraction, ...]:
    """Return the peak activations of each rank. The unit is the activations of one microbatch on
    all of the rank's layers."""
    v = schedule.stages_per_rank
    return tuple(simple.peak_activations(order, v) for order in schedule.flat)


Times = Mapping[Op, tuple[Fraction | int, Fraction | int]]  # operation -> start and end
Steps = list[tuple[Fraction | int, Fraction]]  # (time, number from this time on)


def held_activations(schedule: Schedule, times: Times) -> list[Steps]:
    """Return the activations that each rank holds over time. The unit is the activations of one
    microbatch on all of the rank's layers. Activations count from the start of a forward pass to
    the end of the pass that frees them."""
    curves = []
    for order in schedule.flat:
        steps: Steps = [(0, Fraction(0))]
        for op in order:
            for time, change in zip(times[op], CHANGES[op.kind], strict=True):
                if change:
                    steps.append((time, steps[-1][1] + Fraction(change) / schedule.stages_per_rank))
        curves.append(steps)
    return curves
