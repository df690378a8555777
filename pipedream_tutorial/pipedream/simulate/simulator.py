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
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

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

Number = int | str | Fraction


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


class Event(NamedTuple):
    """One operation, or a pair, on the clock."""

    rank: int
    item: Item
    start: Fraction
    end: Fraction


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """When everything ran. Of `starts` and `ends` there is one list a rank, in the order in which
    the rank ran its items."""

    schedule: Schedule
    costs: Costs
    tick: Fraction
    """In the unit of the costs."""
    starts: tuple[tuple[int, ...], ...]
    """In ticks."""
    ends: tuple[tuple[int, ...], ...]

    @property
    def makespan(self) -> Fraction:
        return max(ends[-1] for ends in self.ends if ends) * self.tick

    @cached_property
    def events(self) -> tuple[tuple[Event, ...], ...]:
        """By rank, in the order in which the rank ran them."""
        times = {t: t * self.tick for line in (*self.starts, *self.ends) for t in line}
        lines = zip(self.schedule.orders, self.starts, self.ends, strict=True)
        return tuple(
            tuple(
                Event(rank, item, times[start], times[end])
                for item, start, end in zip(*line, strict=True)
            )
            for rank, line in enumerate(lines)
        )

    def all_events(self) -> list[Event]:
        """Events of all ranks by start, then end, then rank."""
        flat = [event for events in self.events for event in events]
        return sorted(flat, key=lambda event: (event.start, event.end, event.rank))


class Needs:
    """Finds what operations wait for, knowing which kinds the schedule uses."""

    def __init__(self, schedule: Schedule) -> None:
        self.known = set(schedule.ops())
        self.after = {a: b for chain in schedule.chains for a, b in pairwise(chain)}
        self.before = {b: a for a, b in self.after.items()}

    def of(self, op: Op) -> list[Op]:
        """The operations whose results this one takes in, those on its own stage included."""
        kind, stage, i = op
        if kind == FORWARD:
            return [Op(FORWARD, self.before[stage], i)] if stage in self.before else []
        if kind == WEIGHT_GRADIENT:
            return [Op(INPUT_GRADIENT, stage, i)]
        if kind == RECOMPUTE:
            return [Op(FORWARD, stage, i)]
        again = Op(RECOMPUTE, stage, i)
        found = [again if again in self.known else Op(FORWARD, stage, i)]
        if stage in self.after:
            half = Op(INPUT_GRADIENT, self.after[stage], i)
            found.append(half if half in self.known else half._replace(kind=BACKWARD))
        return found


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Start everything as early as the orders and the data allow.

    Raises DeadlockError when the orders wait for each other, ValueError when an operation needs
    one that no rank runs or that is there twice.
    """
    _check_once_and_whole(schedule)
    clock = _Clock(schedule, costs)
    starts, ends = _run(schedule, clock, [0] * schedule.num_ranks)
    return Timeline(
        schedule=schedule,
        costs=costs,
        tick=clock.tick,
        starts=tuple(map(tuple, starts)),
        ends=tuple(map(tuple, ends)),
    )


def ends_in_a_row(timeline: Timeline, count: int) -> list[int]:
    """When each rank ends the last of `count` batches, in ticks: the same orders again and again,
    a rank's next batch as soon as its own work is done. What `repeat` gives, without its length."""
    clock = _Clock(timeline.schedule, timeline.costs)
    free = [0] * len(timeline.ends)
    now = [ends[-1] if ends else 0 for ends in timeline.ends]
    for done in range(1, count):
        steps = {end - before for end, before in zip(now, free, strict=True)}
        if len(steps) == 1:  # all moved on by the same time, and so they always will
            (step,) = steps
            return [end + (count - done) * step for end in now]
        free = now
        _, ends = _run(timeline.schedule, clock, free)
        now = [line[-1] if line else before for line, before in zip(ends, free, strict=True)]
    return now


def _run(
    schedule: Schedule, clock: _Clock, free: Sequence[int]
) -> tuple[list[list[int]], list[list[int]]]:
    """By rank: starts and ends, in ticks, where rank r is free from free[r] on."""
    ended: _Ended = {}
    wanted = Needs(schedule)
    tables = [_rules(wanted, kinds, ended, clock) for kinds in clock.kinds]
    starts: list[list[int]] = [[] for _ in free]
    ends: list[list[int]] = [[] for _ in free]
    ranks = list(range(len(free)))
    going = True
    while going:  # down the ranks with forward passes, up with backward passes
        going = False
        for rank in ranks:
            order = schedule.orders[rank]
            before = len(ends[rank])
            if before < len(order):
                _advance(order, tables[rank], starts[rank], ends[rank], free[rank])
                going = going or len(ends[rank]) > before
        ranks.reverse()
    if any(len(line) < len(order) for line, order in zip(ends, schedule.orders, strict=True)):
        raise _stuck(schedule, [len(line) for line in ends])
    return starts, ends


_Ended = dict[tuple[str, int], dict[int, int]]
"""(kind of result, stage) -> microbatch -> when it was there; B and I give the same result."""

_Rules = dict[tuple[object, ...], tuple[int, list[tuple[dict[int, int], int]], dict[int, int]]]
"""(kind, stage), of one rank -> duration, (results that it takes in, time to send), its results.
Of a pair the duration alone."""


def _advance(
    order: Sequence[Item], rules: _Rules, starts: list[int], ends: list[int], free: int
) -> None:
    """Run a rank's items up to the first that has to wait."""
    now = ends[-1] if ends else free
    for place in range(len(ends), len(order)):
        item = order[place]
        start = now
        for kind, stage, i in (item,) if len(item) == 3 else item:
            for results, delay in rules[kind, stage][1]:
                if i not in results:
                    return
                if results[i] + delay > start:
                    start = results[i] + delay
        now = start + rules[item[:2] if len(item) == 3 else _kind(item)][0]
        starts.append(start)
        ends.append(now)
        for kind, stage, i in (item,) if len(item) == 3 else item:
            rules[kind, stage][2][i] = now


def _rules(
    wanted: Needs, kinds: dict[tuple[object, ...], Item], ended: _Ended, clock: _Clock
) -> _Rules:
    """What one microbatch's operations on this rank need, all of them do."""
    ops = {op for item in kinds.values() for op in item.parts}
    held = {op.stage for op in ops}

    def results(op: Op) -> dict[int, int]:
        shared = BACKWARD if op.kind == INPUT_GRADIENT else op.kind
        return ended.setdefault((shared, op.stage), {})

    found: _Rules = {key: (clock.durations[key], [], {}) for key in kinds}
    for op in ops:
        taken = [
            (results(need), 0 if need.stage in held else clock.communication)
            for need in wanted.of(op)
        ]
        found[op[:2]] = clock.durations.get(op[:2], 0), taken, results(op)
    return found


class _Clock:
    """Durations in ticks."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.kinds = [
            {item[:2] if len(item) == 3 else _kind(item): item for item in order}
            for order in schedule.orders
        ]
        """By rank: its items without their microbatches -> one such item."""
        position = schedule.position()
        exact = {
            key: costs.duration(item, position)
            for kinds in self.kinds
            for key, item in kinds.items()
        }
        times = [costs.communication, *exact.values()]
        scale = math.lcm(*(time.denominator for time in times))
        ticks = math.gcd(*(int(time * scale) for time in times)) or 1
        self.tick = Fraction(ticks, scale)
        self.communication = int(costs.communication / self.tick)
        self.durations = {key: int(time / self.tick) for key, time in exact.items()}


def _kind(item: Item) -> tuple[object, ...]:
    """Without its microbatches."""
    return tuple(field for op in item.parts for field in op[:2])


def _check_once_and_whole(schedule: Schedule) -> None:
    """Each operation once, and with a backward pass B, or I and W, for each microbatch on a stage;
    ValueError names what is not so."""
    ops = list(schedule.ops())
    if len(set(ops)) < len(ops):
        twice = next(op for op, count in Counter(ops).items() if count > 1)
        raise ValueError(f"{twice} is in the orders twice")
    there: dict[str, set[tuple[int, ...]]] = {kind: set() for kind in "FBIW"}
    for op in ops:
        if op[0] in there:
            there[op[0]].add(op[1:])
    forwards, wholes, inputs, weights = there.values()
    if wholes or inputs or weights:  # otherwise an order of forward passes alone
        for stage, i in (wholes & inputs) | (inputs ^ weights) | (forwards - wholes - inputs):
            raise ValueError(
                f"stage {stage} needs either {stage}B{i} or both {stage}I{i} and {stage}W{i} "
                f"for microbatch {i}"
            )


def _stuck(schedule: Schedule, ended: Sequence[int]) -> Exception:
    """What a rank waits for that none runs; else follow what each stuck rank waits for until a
    rank comes up again."""
    wanted = Needs(schedule)
    ranks = schedule.ranks()
    for op in schedule.ops():
        for need in wanted.of(op):
            if need not in ranks:
                return ValueError(f"{op} needs {need}, which no rank runs")
    done = {
        op
        for order, count in zip(schedule.orders, ended, strict=True)
        for item in order[:count]
        for op in item.parts
    }
    rank = next(r for r, order in enumerate(schedule.orders) if ended[r] < len(order))
    path: dict[int, tuple[Op, Op]] = {}
    while rank not in path:
        item = schedule.orders[rank][ended[rank]]
        path[rank] = next(
            (op, need) for op in item.parts for need in wanted.of(op) if need not in done
        )
        rank = ranks[path[rank][1]]
    circle = list(path.items())[list(path).index(rank) :]
    text = "; ".join(f"rank {r} is at {op}, which needs {need}" for r, (op, need) in circle)
    return DeadlockError([op for _, (op, _) in circle], f"deadlock: {text}")


def load_order(path: Path) -> Schedule:
    """A schedule from a CSV, complete and able to run.

    Raises UserError for orders that are incomplete or that wait for each other.
    """
    schedule = load_csv(path)
    try:
        found = sorted({op.microbatch for op in schedule.ops()})
        if found != list(range(len(found))):
            last = len(found) - 1
            raise ValueError(f"its {len(found)} microbatches are not numbered 0 to {last}")
        if all(op.kind == FORWARD for op in schedule.ops()):
            raise ValueError("it has no backward pass")
        simulate(repeat(schedule, 2), build_costs(schedule))
    except (DeadlockError, ValueError) as error:
        raise UserError(f"{path} cannot run: {error}", "mend the order in the file") from error
    return schedule
