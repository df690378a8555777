"""Runs the orders of a schedule against an exact clock.

The clock counts ticks, whole numbers: a tick is the longest time of which every duration is a
multiple. Times come out as fractions, and only where they are asked for.

An operation starts when its rank has ended the one before it and all that it needs has arrived:

    F of a stage     needs F of the stage before it (and the time to send its output)
    B, I of a stage  need B or I of the stage after it (likewise), and this stage's own F
    W of a stage     needs this stage's own I
    R of a stage     needs this stage's own F; B and I then need R instead of F

Nothing else is assumed, and no schedule is known here by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path

from pipedream.errors import UserError
from pipedream.schedules.ops import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    RECOMPUTE,
    WEIGHT_GRADIENT,
    Item,
    Op,
    Pair,
    Schedule,
    load_csv,
    repeat,
)
from pipedream.simulate.needs import (
    DeadlockError,
    Key,
    Needs,
    check_needs,
    check_once_and_whole,
    deadlock,
)

Number = int | str | Fraction


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Durations by a stage's place in the model, in any unit as long as it is the same."""

    forward: tuple[Fraction, ...]
    input_gradient: tuple[Fraction, ...]
    weight_gradient: tuple[Fraction, ...]
    communication: Fraction = Fraction(0)
    """From the end of an operation on one rank to its result's arrival at another. Sending
    occupies neither rank."""
    overlap_saving: Fraction = Fraction(0)
    """The share of a pair's shorter half that is hidden behind the longer one (0 to 1)."""

    def duration(self, item: Item, position: dict[int, int]) -> Fraction:
        """How long one rank is busy with an operation or a pair."""
        if isinstance(item, Pair):
            halves = [self.duration(op, position) for op in item.parts]
            return sum(halves, Fraction(0)) - self.overlap_saving * min(halves)
        place = position[item.stage]
        both = self.input_gradient[place] + self.weight_gradient[place]
        return {
            FORWARD: self.forward[place],
            RECOMPUTE: self.forward[place],
            BACKWARD: both,
            INPUT_GRADIENT: self.input_gradient[place],
            WEIGHT_GRADIENT: self.weight_gradient[place],
        }[item.kind]


def build_costs(
    schedule: Schedule,
    *,
    forward: Number = 1,
    input_gradient: Number = 1,
    weight_gradient: Number = 1,
    communication: Number = 0,
    scale: Sequence[Number] | None = None,
    overlap_saving: Number = 0,
) -> Costs:
    """Durations per rank's share of the layers, cut evenly over the stages that a rank holds.

    `scale` multiplies them stage by stage (in the model's order) for uneven stages. A schedule
    with v stages a rank has stages of 1/v of the work: the same model for every schedule.
    """
    num_stages = len(schedule.chains[0])
    factors = [Fraction(f) for f in scale] if scale is not None else [Fraction(1)] * num_stages
    if len(factors) != num_stages:
        raise ValueError(f"scale has {len(factors)} values for {num_stages} stages")
    v = schedule.stages_per_rank

    def each(duration: Number) -> tuple[Fraction, ...]:
        return tuple(Fraction(duration) * factor / v for factor in factors)

    return Costs(
        forward=each(forward),
        input_gradient=each(input_gradient),
        weight_gradient=each(weight_gradient),
        communication=Fraction(communication),
        overlap_saving=Fraction(overlap_saving),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One operation, or a pair, on the clock."""

    rank: int
    item: Item
    start: Fraction
    end: Fraction
    bound_by: Op | None
    """The operation whose end (and sending) fixed this start; None at time 0."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """When everything ran. Of `starts`, `ends` and `bounds` there is one list a rank, in the order
    in which the rank ran its items."""

    schedule: Schedule
    costs: Costs
    tick: Fraction
    """In the unit of the costs."""
    starts: tuple[tuple[int, ...], ...]
    """In ticks."""
    ends: tuple[tuple[int, ...], ...]
    bounds: tuple[tuple[Key | None, ...], ...]
    """The operation whose end (and sending) fixed the start; None at time 0."""

    @cached_property
    def events(self) -> tuple[tuple[Event, ...], ...]:
        """By rank, in the order in which the rank ran them."""
        times: dict[int, Fraction] = {}

        def time(ticks: int) -> Fraction:
            found = times.get(ticks)
            if found is None:
                found = times[ticks] = ticks * self.tick
            return found

        return tuple(
            tuple(
                Event(
                    rank=rank,
                    item=item,
                    start=time(start),
                    end=time(end),
                    bound_by=None if bound is None else Op._make(bound),
                )
                for item, start, end, bound in zip(*lines, strict=True)
            )
            for rank, lines in enumerate(
                zip(self.schedule.orders, self.starts, self.ends, self.bounds, strict=True)
            )
        )

    @property
    def makespan(self) -> Fraction:
        return max(ends[-1] for ends in self.ends if ends) * self.tick

    def all_events(self) -> list[Event]:
        """Events of all ranks by start, then end, then rank."""
        flat = [event for events in self.events for event in events]
        return sorted(flat, key=lambda event: (event.start, event.end, event.rank))


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Start everything as early as the orders and the data allow.

    Raises DeadlockError when the orders wait for each other, ValueError when an operation needs
    one that no rank runs or that is there twice.
    """
    run = _Run(schedule, costs)
    ready = list(range(schedule.num_ranks))
    while ready:
        ready += run.advance(ready.pop())
    run.check_all_ran()
    return Timeline(
        schedule=schedule,
        costs=costs,
        tick=run.clock.tick,
        starts=tuple(map(tuple, run.starts)),
        ends=tuple(map(tuple, run.ends)),
        bounds=tuple(map(tuple, run.bounds)),
    )


class _Run:
    """What has run so far, and which ranks wait for what."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.wanted = schedule, Needs(schedule)
        check_once_and_whole(schedule, self.wanted)
        self.clock = _Clock(schedule, costs)
        self.starts: list[list[int]] = [[] for _ in schedule.orders]
        self.ends: list[list[int]] = [[] for _ in schedule.orders]
        self.bounds: list[list[Key | None]] = [[] for _ in schedule.orders]
        self.done: dict[Key, tuple[int, int]] = {}
        """operation -> when it ended, and on which rank"""
        self.waiting: dict[Key, list[int]] = {}

    def advance(self, rank: int) -> list[int]:
        """Run the rank's operations up to the first that has to wait; the ranks that this frees."""
        order, begun = self.schedule.orders[rank], self.starts[rank]
        ended, bound = self.ends[rank], self.bounds[rank]
        done, waiting, communication = self.done, self.waiting, self.clock.communication
        keys_of, duration = self.wanted.keys_of, self.clock.duration
        now = ended[-1] if ended else 0
        last: Key | None = order[len(ended) - 1].parts[-1] if ended else None
        freed: list[int] = []
        while len(ended) < len(order):
            item = order[len(ended)]
            parts = item.parts
            start, by = now, last
            for need in keys_of(parts):
                found = done.get(need)
                if found is None:
                    waiting.setdefault(need, []).append(rank)
                    return freed
                arrival = found[0] if found[1] == rank else found[0] + communication
                if arrival > start:
                    start, by = arrival, need
            now = start + duration(item)
            begun.append(start)
            ended.append(now)
            bound.append(by)
            for op in parts:
                done[op] = now, rank
                if op in waiting:
                    freed += waiting.pop(op)
            last = parts[-1]
        return freed

    def check_all_ran(self) -> None:
        if self.waiting:
            check_needs(self.schedule, self.wanted)
            raise deadlock(self.schedule, [len(line) for line in self.ends], self.wanted, self.done)


class _Clock:
    """Durations in ticks."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        position = schedule.position()
        kinds = {_without_microbatch(item): item for order in schedule.orders for item in order}
        exact = {key: costs.duration(item, position) for key, item in kinds.items()}
        times = [costs.communication, *exact.values()]
        scale = math.lcm(*(time.denominator for time in times))
        ticks = math.gcd(*(int(time * scale) for time in times)) or 1
        self.tick = Fraction(ticks, scale)
        self.communication = int(costs.communication / self.tick)
        self._durations = {key: int(time / self.tick) for key, time in exact.items()}

    def duration(self, item: Item) -> int:
        return self._durations[_without_microbatch(item)]


def _without_microbatch(item: Item) -> tuple[object, ...]:
    if isinstance(item, Op):
        return item[:2]
    return item[0][:2] + item[1][:2]


def load_order(path: Path) -> Schedule:
    """A schedule from a CSV, complete and able to run.

    Raises UserError for orders that are incomplete or that wait for each other.
    """
    schedule = load_csv(path)
    try:
        _check_passes(schedule)
        simulate(repeat(schedule, 2), build_costs(schedule))
    except (DeadlockError, ValueError) as error:
        raise UserError(f"{path} cannot run: {error}", "mend the order in the file") from error
    return schedule


def _check_passes(schedule: Schedule) -> None:
    found = sorted({op.microbatch for op in schedule.ops()})
    if found != list(range(len(found))):
        raise ValueError(f"its {len(found)} microbatches are not numbered 0 to {len(found) - 1}")
    done = {(op.kind, op.stage, op.microbatch) for op in schedule.ops()}
    for _, stage, i in done:
        halves = [(kind, stage, i) in done for kind in (INPUT_GRADIENT, WEIGHT_GRADIENT)]
        backward = ("B", stage, i) in done or all(halves)
        if (FORWARD, stage, i) not in done or not backward:
            raise ValueError(f"stage {stage} needs F, and B or both I and W, of microbatch {i}")
