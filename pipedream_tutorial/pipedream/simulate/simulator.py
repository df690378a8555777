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

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from pipedream.errors import UserError
from pipedream.schedules.ops import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    RECOMPUTE,
    WEIGHT_GRADIENT,
    Item,
    Op,
    Schedule,
    load_csv,
    repeat,
)

Number = int | str | Fraction


class DeadlockError(RuntimeError):
    """The orders can never all run: some operations wait for each other in a circle."""

    def __init__(self, waits: dict[int, tuple[Op, str, int]]) -> None:
        """`waits`: rank -> the operation it is at, the same in words, and the rank it waits for."""
        path: list[int] = []
        rank = next(iter(waits))
        while rank in waits and rank not in path:
            path.append(rank)
            rank = waits[rank][2]
        circle = path[path.index(rank) :] if rank in path else path
        text = "; ".join(f"rank {rank} is at {waits[rank][1]}" for rank in circle)
        super().__init__(f"deadlock: {text}")
        self.cycle = [waits[rank][0] for rank in circle]


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
        halves = [self._of(op.kind, position[op.stage]) for op in item.parts]
        hidden = self.overlap_saving * min(halves) if len(halves) > 1 else 0
        return sum(halves, Fraction(0)) - hidden

    def _of(self, kind: str, place: int) -> Fraction:
        if kind in (FORWARD, RECOMPUTE):
            return self.forward[place]
        first = Fraction(0) if kind == WEIGHT_GRADIENT else self.input_gradient[place]
        return first if kind == INPUT_GRADIENT else first + self.weight_gradient[place]


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
    scale = scale or [1] * num_stages
    if len(scale) != num_stages:
        raise ValueError(f"scale has {len(scale)} values for {num_stages} stages")
    shares = [Fraction(factor) / schedule.stages_per_rank for factor in scale]
    return Costs(
        forward=tuple(Fraction(forward) * share for share in shares),
        input_gradient=tuple(Fraction(input_gradient) * share for share in shares),
        weight_gradient=tuple(Fraction(weight_gradient) * share for share in shares),
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
    starts: Sequence[Sequence[int]]
    """In ticks."""
    ends: Sequence[Sequence[int]]

    @property
    def makespan(self) -> Fraction:
        return max(ends[-1] for ends in self.ends if ends) * self.tick

    @cached_property
    def events(self) -> tuple[tuple[Event, ...], ...]:
        """By rank, in the order in which the rank ran them."""
        times = {t: t * self.tick for line in (*self.starts, *self.ends) for t in line}
        lines = zip(self.schedule.orders, self.starts, self.ends, strict=True)
        return tuple(
            tuple(Event(rank, i, times[s], times[e]) for i, s, e in zip(*line, strict=True))
            for rank, line in enumerate(lines)
        )

    def all_events(self) -> list[Event]:
        """Events of all ranks by start, then end, then rank."""
        return sorted(chain(*self.events), key=lambda event: (event.start, event.end, event.rank))


class Needs:
    """Finds what operations wait for, knowing which ones the schedule has."""

    def __init__(self, schedule: Schedule) -> None:
        self.rank_of = schedule.ranks()
        self.recomputes = RECOMPUTE in schedule.kinds
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
        found = [Op(RECOMPUTE if self.recomputes else FORWARD, stage, i)]
        if stage in self.after:
            half = Op(INPUT_GRADIENT, self.after[stage], i)
            found.append(half if half in self.rank_of else half._replace(kind=BACKWARD))
        return found


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Start everything as early as the orders and the data allow.

    Raises DeadlockError when the orders wait for each other, ValueError when an operation needs
    one that no rank runs or that is there twice.
    """
    _check_once_and_whole(schedule)
    return _run(schedule, costs, [0] * schedule.num_ranks)


def ends_in_a_row(timeline: Timeline, count: int) -> list[int]:
    """When each rank ends the last of `count` batches, in ticks: the same orders again and again,
    a rank's next batch as soon as its own work is done. What `repeat` gives, without its length."""
    now = timeline
    free = [0] * len(timeline.ends)
    for left in reversed(range(count)):
        lines = list(zip(free, now.starts, now.ends, strict=True))
        free = [ends[-1] if ends else before for before, _, ends in lines]
        # Once a batch starts a step after the one before, so do all: no rank that was kept by its
        # own work is freer now, and none that waited for data is free too late for them.
        own = [(before, starts[0], ends[-1]) for before, starts, ends in lines if ends]
        step = next(end - before for before, start, end in own if start == before)
        if all(
            end - step == start if start == before else end - step <= start
            for before, start, end in own
        ):
            return [end + left * step if end else 0 for end in free]
        if left:
            now = _run(timeline.schedule, timeline.costs, free)
    return free


Results = dict[int, int]
"""Of a stage's F, R, W or backward pass: microbatch -> when it was there, in ticks."""


class Rule(NamedTuple):
    """For a rank's items that differ in nothing but their microbatches."""

    lasts: int
    takes: list[tuple[int, Results, int]]
    """For which operation of the item (0, or 1 in a pair), what, and the time to send it."""
    gives: list[Results]


Rules = dict[tuple[Any, Any], Rule]
"""By the item's key."""


def _run(schedule: Schedule, costs: Costs, free: Sequence[int]) -> Timeline:
    """Where rank r is free from free[r] ticks on."""
    tick, rules = _rules(schedule, costs)
    starts: list[list[int]] = [[] for _ in free]
    ends: list[list[int]] = [[] for _ in free]
    ranks = list(map(_advance, schedule.orders, rules, free, starts, ends))
    done = -1
    while done < sum(map(len, ends)):  # down the ranks with forward passes, up with backward passes
        done = sum(map(len, ends))
        for rank in ranks:
            next(rank, None)
        ranks.reverse()
    if done < sum(map(len, schedule.orders)):
        raise _stuck(schedule, [len(own) for own in ends])
    return Timeline(schedule=schedule, costs=costs, tick=tick, starts=starts, ends=ends)


def _advance(
    order: Sequence[Item], rules: Rules, now: int, starts: list[int], ends: list[int]
) -> Iterator[None]:
    """Run a rank's items; comes back where it has to wait."""
    for item in order:
        parts = item.parts
        lasts, takes, gives = rules[item.key]
        for place, results, delay in takes:
            i = parts[place].microbatch
            while i not in results:
                yield
            if results[i] + delay > now:
                now = results[i] + delay
        starts.append(now)
        now += lasts
        ends.append(now)
        for op, results in zip(parts, gives, strict=True):
            results[op.microbatch] = now


def _rules(schedule: Schedule, costs: Costs) -> tuple[Fraction, list[Rules]]:
    """The tick, and the rules of each rank."""
    wanted = Needs(schedule)
    position = schedule.position()
    some = [{item.key: item for item in order} for order in schedule.orders]
    lasts = {key: costs.duration(item, position) for own in some for key, item in own.items()}
    times = [costs.communication, *lasts.values()]
    scale = math.lcm(*(time.denominator for time in times))
    tick = Fraction(math.gcd(*(int(time * scale) for time in times)) or 1, scale)
    ended: dict[tuple[str, int], Results] = defaultdict(dict)

    def results(op: Op) -> Results:  # B and I give the same
        return ended[BACKWARD if op.kind == INPUT_GRADIENT else op.kind, op.stage]

    def rule(item: Item, stages: Sequence[int]) -> Rule:
        takes = []
        for place, op in enumerate(item.parts):
            for need in wanted.of(op):
                delay = 0 if need.stage in stages else int(costs.communication / tick)
                takes.append((place, results(need), delay))
        return Rule(int(lasts[item.key] / tick), takes, list(map(results, item.parts)))

    return tick, [
        {key: rule(item, stages) for key, item in own.items()}
        for own, stages in zip(some, schedule.stages(), strict=True)
    ]


def _check_once_and_whole(schedule: Schedule) -> None:
    """Each operation once, and with a backward pass B, or I and W, for each microbatch on a stage;
    ValueError names what is not so."""
    ((op, times),) = Counter(schedule.ops()).most_common(1)
    if times > 1:
        raise ValueError(f"{op} is in the orders twice")
    if schedule.kinds == {FORWARD}:
        return
    backward: dict[tuple[int, int], str] = {}
    for kind, stage, i in schedule.ops():
        done = backward.get((stage, i), "")
        backward[stage, i] = done + kind if kind in "BIW" else done
    for (stage, i), kinds in backward.items():
        if kinds not in ("B", "IW", "WI"):
            raise ValueError(
                f"stage {stage} needs either {stage}B{i} or both {stage}I{i} and {stage}W{i} "
                f"for microbatch {i}"
            )


def _stuck(schedule: Schedule, ended: Sequence[int]) -> Exception:
    """What a rank waits for that none runs; else the circle in which they wait."""
    wanted = Needs(schedule)
    for op in schedule.ops():
        for need in wanted.of(op):
            if need not in wanted.rank_of:
                return ValueError(f"{op} needs {need}, which no rank runs")
    left = [order[count:] for order, count in zip(schedule.orders, ended, strict=True)]
    to_come = {op for items in left for item in items for op in item.parts}
    waits = {}
    for rank, items in enumerate(left):
        needs = ((op, need) for item in items[:1] for op in item.parts for need in wanted.of(op))
        for op, need in needs:
            if need in to_come:
                waits[rank] = op, f"{op}, which needs {need}", wanted.rank_of[need]
                break
    return DeadlockError(waits)


def load_order(path: Path) -> Schedule:
    """A schedule from a CSV, complete and able to run.

    Raises UserError for orders that are incomplete or that wait for each other.
    """
    schedule = load_csv(path)
    count = schedule.num_microbatches
    try:
        if {i for _, _, i in schedule.ops()} != set(range(count)):
            raise ValueError(f"its {count} microbatches are not numbered 0 to {count - 1}")
        if schedule.kinds == {FORWARD}:
            raise ValueError("it has no backward pass")
        simulate(repeat(schedule, 2), build_costs(schedule))
    except (DeadlockError, ValueError) as error:
        raise UserError(f"{path} cannot run: {error}", "mend the order in the file") from error
    return schedule
