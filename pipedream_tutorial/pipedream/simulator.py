"""Runs the orders of a schedule against a clock of exact fractions.

An operation starts when its rank has ended the one before it and all that it needs has arrived:

    F of a stage     needs F of the stage before it (and the time to send its output)
    B, I of a stage  need B or I of the stage after it (likewise), and this stage's own F
    W of a stage     needs this stage's own I

Nothing else is assumed, and no schedule is known here by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """When everything ran."""

    schedule: Schedule
    costs: Costs
    events: tuple[tuple[Event, ...], ...]
    """By rank, in the order in which the rank ran them."""

    @property
    def makespan(self) -> Fraction:
        return max(events[-1].end for events in self.events if events)

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
        self.known = set(schedule.ops())
        self.after = {a: b for chain in schedule.chains for a, b in pairwise(chain)}
        self.before = {b: a for a, b in self.after.items()}

    def of(self, op: Op) -> list[Op]:
        kind, stage, microbatch = op
        if kind == FORWARD:
            previous = self.before.get(stage)
            return [] if previous is None else [Op(FORWARD, previous, microbatch)]
        if kind == WEIGHT_GRADIENT:
            return [Op(INPUT_GRADIENT, stage, microbatch)]
        found = [Op(FORWARD, stage, microbatch)]
        following = self.after.get(stage)
        if following is not None:
            whole = Op(BACKWARD, following, microbatch)
            half = Op(INPUT_GRADIENT, following, microbatch)
            found.append(half if half in self.known else whole)
        return found


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Start everything as early as the orders and the data allow.

    Raises DeadlockError when the orders wait for each other, ValueError when an operation needs
    one that no rank runs or that is there twice.
    """
    ranks, position, wanted = schedule.ranks(), schedule.position(), _Needs(schedule)
    _check_complete(schedule, wanted, ranks)
    done: dict[Op, Fraction] = {}
    events: list[list[Event]] = [[] for _ in schedule.orders]
    ready = list(range(schedule.num_ranks))
    waiting: dict[Op, list[int]] = {}
    while ready:
        rank = ready.pop()
        order = schedule.orders[rank]
        while len(events[rank]) < len(order):
            item = order[len(events[rank])]
            inputs = [need for op in item.parts for need in wanted.of(op)]
            missing = next((need for need in inputs if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            event = _event(rank, item, inputs, events[rank], done, ranks, costs, position)
            events[rank].append(event)
            for op in item.parts:
                done[op] = event.end
                ready += waiting.pop(op, [])
    if waiting:
        raise _deadlock(schedule, events, wanted, done, ranks)
    return Timeline(schedule=schedule, costs=costs, events=tuple(tuple(line) for line in events))


def _event(
    rank: int,
    item: Item,
    inputs: list[Op],
    earlier: list[Event],
    done: dict[Op, Fraction],
    ranks: dict[Op, int],
    costs: Costs,
    position: dict[int, int],
) -> Event:
    start, bound_by = Fraction(0), None
    if earlier:
        start, bound_by = earlier[-1].end, earlier[-1].item.parts[-1]
    for need in inputs:
        arrival = done[need] + (costs.communication if ranks[need] != rank else 0)
        if arrival > start:
            start, bound_by = arrival, need
    end = start + costs.duration(item, position)
    return Event(rank=rank, item=item, start=start, end=end, bound_by=bound_by)


def _check_complete(schedule: Schedule, wanted: _Needs, ranks: dict[Op, int]) -> None:
    seen: set[Op] = set()
    for op in schedule.ops():
        if op in seen:
            raise ValueError(f"{op} is in the orders twice")
        seen.add(op)
    _check_backward(schedule, seen)
    for op in schedule.ops():
        for need in wanted.of(op):
            if need not in ranks:
                raise ValueError(f"{op} needs {need}, which no rank runs")


def _check_backward(schedule: Schedule, seen: set[Op]) -> None:
    """What nothing waits for can be missing too; forward passes alone are a schedule."""
    if all(op.kind == FORWARD for op in seen):
        return
    for _, stage, microbatch in schedule.ops():
        whole = Op(BACKWARD, stage, microbatch)
        halves = [Op(kind, stage, microbatch) for kind in (INPUT_GRADIENT, WEIGHT_GRADIENT)]
        there = [half for half in halves if half in seen]
        if len(there) != (0 if whole in seen else 2):
            raise ValueError(
                f"stage {stage} needs either {whole} or both {halves[0]} and {halves[1]} "
                f"for microbatch {microbatch}"
            )


def _deadlock(
    schedule: Schedule,
    events: list[list[Event]],
    wanted: _Needs,
    done: dict[Op, Fraction],
    ranks: dict[Op, int],
) -> DeadlockError:
    """Follow what each stuck rank waits for until a rank comes up again."""
    rank = next(r for r, order in enumerate(schedule.orders) if len(events[r]) < len(order))
    path: list[tuple[int, Op, Op]] = []
    while rank not in [r for r, _, _ in path]:
        item = schedule.orders[rank][len(events[rank])]
        stuck, missing = next(
            (op, need) for op in item.parts for need in wanted.of(op) if need not in done
        )
        path.append((rank, stuck, missing))
        rank = ranks[missing]
    start = [r for r, _, _ in path].index(rank)
    circle = path[start:]
    text = "; ".join(f"rank {r} is at {op}, which needs {need}" for r, op, need in circle)
    return DeadlockError([op for _, op, _ in circle], f"deadlock: {text}")
