"""Runs the orders of a schedule against an exact clock.

The clock counts ticks, whole numbers: a tick is the longest time of which every duration is a
multiple. Times come out as fractions, and only where they are asked for.

An operation starts when its rank has ended the one before it and all that it needs has arrived:

    F of a stage     needs F of the stage before it (and the time to send its output)
    B, I of a stage  need B or I of the stage after it (likewise), and this stage's own F
    W of a stage     needs this stage's own I

Nothing else is assumed, and no schedule is known here by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise

from pipedream.ops import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Item,
    Op,
    Pair,
    Schedule,
)

Number = int | str | Fraction
_Key = tuple[str, int, int]
"""An Op's fields; equal to the Op, and quicker to make."""


class DeadlockError(RuntimeError):
    """The orders can never all run: some operations wait for each other in a circle."""

    def __init__(self, cycle: list[Op], text: str) -> None:
        super().__init__(text)
        self.cycle = cycle


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
    bounds: tuple[tuple[_Key | None, ...], ...]
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


def needs(op: Op, schedule: Schedule) -> list[Op]:
    """The operations whose results this one takes in, those on its own stage included."""
    return _Needs(schedule).of(op)


class _Needs:
    """Finds what operations wait for, knowing which backward kinds the schedule uses."""

    def __init__(self, schedule: Schedule) -> None:
        self.halves = {(stage, i) for kind, stage, i in schedule.ops() if kind == INPUT_GRADIENT}
        self.after = {a: b for chain in schedule.chains for a, b in pairwise(chain)}
        self.before = {b: a for a, b in self.after.items()}

    def of(self, op: Op) -> list[Op]:
        return [Op._make(key) for key in self.keys(op)]

    def keys_of(self, parts: tuple[Op, ...]) -> tuple[_Key, ...]:
        if len(parts) == 1:
            return self.keys(parts[0])
        return tuple(key for op in parts for key in self.keys(op))

    def keys(self, op: Op) -> tuple[_Key, ...]:
        kind, stage, microbatch = op
        if kind == FORWARD:
            previous = self.before.get(stage)
            return () if previous is None else ((FORWARD, previous, microbatch),)
        if kind == WEIGHT_GRADIENT:
            return ((INPUT_GRADIENT, stage, microbatch),)
        own = (FORWARD, stage, microbatch)
        following = self.after.get(stage)
        if following is None:
            return (own,)
        cut = (following, microbatch) in self.halves
        return own, (INPUT_GRADIENT if cut else BACKWARD, following, microbatch)


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Start everything as early as the orders and the data allow.

    Raises DeadlockError when the orders wait for each other, ValueError when an operation needs
    one that no rank runs or that is there twice.
    """
    wanted = _Needs(schedule)
    _check_once_and_whole(schedule, wanted)
    clock = _Clock(schedule, costs)
    by: _Key | None
    last: Op | None
    starts: list[list[int]] = [[] for _ in schedule.orders]
    ends: list[list[int]] = [[] for _ in schedule.orders]
    bounds: list[list[_Key | None]] = [[] for _ in schedule.orders]
    done: dict[_Key, tuple[int, int]] = {}  # operation -> when it ended, and on which rank
    waiting: dict[_Key, list[int]] = {}
    ready = list(range(schedule.num_ranks))
    while ready:
        rank = ready.pop()
        begun, ended, bound = starts[rank], ends[rank], bounds[rank]
        order, place = schedule.orders[rank], len(ended)
        now, last = (ended[-1], order[place - 1].parts[-1]) if ended else (0, None)
        while place < len(order):
            item = order[place]
            parts = item.parts
            start, by, missing = now, last, None
            for need in wanted.keys_of(parts):
                found = done.get(need)
                if found is None:
                    missing = need
                    break
                arrival = found[0] if found[1] == rank else found[0] + clock.communication
                if arrival > start:
                    start, by = arrival, need
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            now = start + clock.duration(item)
            begun.append(start)
            ended.append(now)
            bound.append(by)
            for op in parts:
                done[op] = now, rank
                if op in waiting:
                    ready += waiting.pop(op)
            last = parts[-1]
            place += 1
    if waiting:
        _check_needs(schedule, wanted)
        raise _deadlock(schedule, [len(line) for line in ends], wanted, done)
    return Timeline(
        schedule=schedule,
        costs=costs,
        tick=clock.tick,
        starts=tuple(map(tuple, starts)),
        ends=tuple(map(tuple, ends)),
        bounds=tuple(map(tuple, bounds)),
    )


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


def _check_once_and_whole(schedule: Schedule, wanted: _Needs) -> None:
    """Each operation once, and with a backward pass B, or I and W, for each microbatch on a stage;
    ValueError names what is not so."""
    there: dict[str, set[tuple[int, int]]] = {}
    for kind, stage, microbatch in schedule.ops():
        found = there.setdefault(kind, set())
        if (stage, microbatch) in found:
            raise ValueError(f"{Op(kind, stage, microbatch)} is in the orders twice")
        found.add((stage, microbatch))
    whole, weights = there.get(BACKWARD, set()), there.get(WEIGHT_GRADIENT, set())
    forwards_alone = not whole and not weights and not wanted.halves
    as_it_should = wanted.halves == weights and whole.isdisjoint(weights)
    if not forwards_alone and not (as_it_should and there.get(FORWARD, set()) <= whole | weights):
        _name_backward(schedule, there)


def _check_needs(schedule: Schedule, wanted: _Needs) -> None:
    known = set(schedule.ops())
    for op in schedule.ops():
        for need in wanted.of(op):
            if need not in known:
                raise ValueError(f"{op} needs {need}, which no rank runs")


def _name_backward(schedule: Schedule, there: dict[str, set[tuple[int, int]]]) -> None:
    for _, stage, microbatch in schedule.ops():
        at = (stage, microbatch)
        kinds = (INPUT_GRADIENT, WEIGHT_GRADIENT)
        halves = [at in there.get(kind, ()) for kind in kinds]
        if sum(halves) != (0 if at in there.get(BACKWARD, ()) else 2):
            whole, first, second = (Op(kind, *at) for kind in (BACKWARD, *kinds))
            raise ValueError(
                f"stage {stage} needs either {whole} or both {first} and {second} "
                f"for microbatch {microbatch}"
            )


def _deadlock(
    schedule: Schedule, ended: list[int], wanted: _Needs, done: dict[_Key, tuple[int, int]]
) -> DeadlockError:
    """Follow what each stuck rank waits for until a rank comes up again."""
    ranks = schedule.ranks()
    rank = next(r for r, order in enumerate(schedule.orders) if ended[r] < len(order))
    path: list[tuple[int, Op, Op]] = []
    while rank not in [r for r, _, _ in path]:
        item = schedule.orders[rank][ended[rank]]
        stuck, missing = next(
            (op, need) for op in item.parts for need in wanted.of(op) if need not in done
        )
        path.append((rank, stuck, missing))
        rank = ranks[missing]
    start = [r for r, _, _ in path].index(rank)
    circle = path[start:]
    text = "; ".join(f"rank {r} is at {op}, which needs {need}" for r, op, need in circle)
    return DeadlockError([op for _, op, _ in circle], f"deadlock: {text}")
