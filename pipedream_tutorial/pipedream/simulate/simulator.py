"""Simulate a schedule's orders with an exact clock.

The clock counts whole ticks. A tick is the greatest common divisor of all durations. Times are
fractions and are computed only on request. An operation starts when its rank has finished the
previous operation and all inputs have arrived (`Schedule.needs`). An input from another rank
arrives after the communication time. There are no other assumptions, and no schedule is treated
specially."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import pipedream_simple as simple

from pipedream.errors import UserError
from pipedream.schedules.ops import Item, Op, Schedule, load_csv, repeat

Number = int | str | Fraction


class DeadlockError(RuntimeError):
    """Error raised if orders deadlock because operations wait for each other in a cycle."""

    def __init__(self, waiting: Mapping[int, tuple[str, int]]) -> None:
        """`waiting` maps each blocked rank to its current operation and the rank for which it
        waits. If no other rank can unblock a rank, the second value is the rank itself."""
        path: list[int] = []
        rank = min(waiting)
        while rank not in path:
            path.append(rank)
            _, rank = waiting[rank]
        cycle = path[path.index(rank) :]
        text = "; ".join(f"rank {rank} is at {waiting[rank][0]}" for rank in cycle)
        super().__init__(f"deadlock: {text}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Durations of the operations, indexed by a stage's position in the model. All durations are in
    the same unit."""

    forward: tuple[Fraction, ...]
    input_gradient: tuple[Fraction, ...]
    weight_gradient: tuple[Fraction, ...]
    communication: Fraction = Fraction(0)
    """Time from the end of an operation on one rank to the arrival of its result at another rank.
    Sending occupies neither rank."""
    overlap_saving: Fraction = Fraction(0)  # share of a pair's shorter half hidden by the longer

    def duration(self, item: Item) -> Fraction:
        """Return the time that a rank needs for an operation or a pair."""
        halves = []
        for kind, stage, _ in item.parts:
            durations = self.forward, self.input_gradient, self.weight_gradient
            f, i, w = (durations_by_stage[stage] for durations_by_stage in durations)
            halves.append({"F": f, "B": i + w, "I": i, "W": w}[kind])
        hidden = self.overlap_saving * min(halves) if len(halves) > 1 else 0
        return sum(halves, Fraction(0)) - hidden


def build_costs(
    schedule: Schedule,
    *,
    forward: Number = 1,
    input_gradient: Number = 1,
    weight_gradient: Number = 1,
    communication: Number = 0,
    overlap_saving: Number = 0,
    stage_scale: Sequence[Number] | None = None,
) -> Costs:
    """Compute the durations of the stages. `forward`, `input_gradient` and `weight_gradient` are
    durations of all layers of one rank, and are divided equally among the rank's stages.
    `stage_scale` contains one factor for each of several equal groups of the model's layers, in the
    order of the model. The factors do not depend on how the layers are partitioned into stages.
    Raises UserError if the number of factors is not a multiple of the number of ranks."""
    check_scale(stage_scale, schedule.num_ranks)
    factors = stage_factors(stage_scale or [1], schedule.num_stages)

    def per_stage(whole: Number) -> tuple[Fraction, ...]:
        return tuple(Fraction(whole) / schedule.stages_per_rank * factor for factor in factors)

    return Costs(
        forward=per_stage(forward),
        input_gradient=per_stage(input_gradient),
        weight_gradient=per_stage(weight_gradient),
        communication=Fraction(communication),
        overlap_saving=Fraction(overlap_saving),
    )


def stage_factors(scale: Sequence[Number], num_stages: int) -> list[Fraction]:
    """Return the factor of each stage, which is the mean of the factors of its layers."""
    factors = [Fraction(factor) for factor in scale for _ in range(num_stages)]
    size = len(scale)
    return [sum(factors[k * size : (k + 1) * size]) / Fraction(size) for k in range(num_stages)]


def check_scale(scale: Sequence[Number] | None, num_ranks: int) -> None:
    if scale is not None and len(scale) % num_ranks:
        raise UserError(
            f"stage_scale has {len(scale)} factors for {num_ranks} ranks",
            f"give {num_ranks} values, such as stage_scale={','.join(['1'] * num_ranks)}, or one "
            "value per chunk",
        )


class Event(NamedTuple):
    """An operation or a pair, with its times."""

    rank: int
    item: Item
    start: Fraction
    end: Fraction


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Times of all operations. `starts` and `ends` have one list per rank, in the order in which
    the rank ran its items."""

    schedule: Schedule
    costs: Costs
    tick: Fraction  # in the unit of the costs
    starts: Sequence[Sequence[int]]  # in ticks
    ends: Sequence[Sequence[int]]

    @property
    def makespan(self) -> Fraction:
        return max(ends[-1] for ends in self.ends if ends) * self.tick

    @cached_property
    def events(self) -> list[Event]:
        """Events of all ranks, sorted by start, then end, then rank."""
        ran: list[tuple[int, int, int, Item]] = []
        lines = zip(self.starts, self.ends, self.schedule.orders, strict=True)
        for rank, line in enumerate(lines):
            ran += [(start, end, rank, item) for start, end, item in zip(*line, strict=True)]
        ran.sort(key=itemgetter(0, 1, 2))
        tick = self.tick
        return [Event(rank, item, start * tick, end * tick) for start, end, rank, item in ran]

    @cached_property
    def times(self) -> dict[Op, tuple[Fraction, Fraction]]:
        """Start and end of every operation. Both operations of a pair have the start and the end of
        the pair."""
        return {op: (e.start, e.end) for e in self.events for op in e.item.parts}


def simulate(schedule: Schedule, costs: Costs, free: Sequence[int] = ()) -> Timeline:
    """Start every operation as early as the orders and the data allow. Rank r does not start before
    tick `free[r]`. The schedule must be complete (see `check_complete`). Raises DeadlockError if
    the orders would deadlock."""
    tick, rules = _build_rules(schedule, costs)
    free = free or [0] * schedule.num_ranks
    starts: list[list[int]] = [[] for _ in free]
    ends: list[list[int]] = [[] for _ in free]
    ranks = list(map(_advance, schedule.orders, rules, free, starts, ends))
    if run_until_stuck(ranks, ends) < sum(map(len, schedule.orders)):
        raise _deadlock_error(schedule, [len(done) for done in ends])
    return Timeline(schedule=schedule, costs=costs, tick=tick, starts=starts, ends=ends)


def ends_of_repeats(timeline: Timeline, count: int) -> list[int]:
    """Return the tick at which each rank ends the last of `count` batches. The same orders are
    repeated, and a rank starts its next batch as soon as it has finished the previous one.
    Simulating the schedule that `repeat` returns gives the same result, but takes more time."""
    lines = zip(timeline.starts, timeline.ends, strict=True)
    spans = [ends[-1] - starts[0] for starts, ends in lines if ends]
    first_order = timeline.schedule.orders[0]
    if first_order and first_order[0].parts[0].stage == 0 and spans[0] == max(spans):
        # Every operation needs an operation of stage 0 on rank 0. If no rank is busy for longer
        # than rank 0, all ranks are free in time, and each batch takes as long as the first.
        return [ends[-1] + (count - 1) * spans[0] if ends else 0 for ends in timeline.ends]
    free = [0] * len(timeline.ends)
    for num_left in reversed(range(count)):
        old_free = free
        free = [ends[-1] if ends else 0 for ends in timeline.ends]
        steps = {end - old for old, end in zip(old_free, free, strict=True) if end}
        if len(steps) == 1:  # all ranks advanced by the same time, as in all later batches
            (step,) = steps
            return [end + num_left * step for end in free]
        if num_left:
            timeline = simulate(timeline.schedule, timeline.costs, free)
    return free


_Results = dict[int, int]  # microbatch -> tick at which the result was ready

_Rule = tuple[int, list[tuple[int, _Results, int]], list[tuple[int, _Results]]]
"""Rule for one kind of item on a rank: its duration, (index, input, time to send) for each input,
and (index, result) for each result. The index is the position of the operation in the item."""

_Kind = tuple[object, ...]  # an item without its microbatches


def _kind(item: Item) -> _Kind:
    return item[:2] if isinstance(item, Op) else tuple(op[:2] for op in item)


def run_until_stuck(ranks: list[Iterator[None]], ends: Sequence[Sequence[int]]) -> int:
    """Run each rank until it must wait, and repeat until no rank makes progress. The ranks append
    to the lists in `ends`. Return the total length of these lists."""
    old_total = -1
    while old_total < (total := sum(map(len, ends))):
        old_total = total
        for rank in ranks:
            next(rank, None)
        ranks.reverse()  # visits ranks downward for forward passes, upward for backward passes
    return total


def _advance(
    order: Sequence[Item], rules: dict[_Kind, _Rule], now: int, starts: list[int], ends: list[int]
) -> Iterator[None]:
    """Run a rank's items, and yield whenever the rank must wait."""
    for item in order:
        numbers: Sequence[int]
        if len(item) == 3:  # an operation; this code takes most of the time, so it is inlined
            kind, stage, number = item
            duration, inputs, outputs = rules[kind, stage]
            numbers = (number,)
        else:
            duration, inputs, outputs = rules[_kind(item)]
            numbers = [op.microbatch for op in item]
        for position, results, delay in inputs:
            i = numbers[position]
            while i not in results:
                yield
            ready = results[i] + delay
            if ready > now:
                now = ready
        starts.append(now)
        now += duration
        ends.append(now)
        for position, results in outputs:
            results[numbers[position]] = now


def _build_rules(schedule: Schedule, costs: Costs) -> tuple[Fraction, list[dict[_Kind, _Rule]]]:
    """Return the length of a tick. Also return, for each rank, the rules by which `_advance` runs
    each kind of operation."""
    kinds = []
    for order in schedule.orders:
        # One item of each kind, including pairs
        one_of_each = dict(zip(map(itemgetter(0, 1), order), order, strict=True)).values()
        kinds.append({_kind(item): item for item in one_of_each})
    durations = {kind: costs.duration(item) for items in kinds for kind, item in items.items()}
    times = [costs.communication, *durations.values()]
    scale = math.lcm(*(time.denominator for time in times))
    tick = Fraction(math.gcd(*(int(time * scale) for time in times)) or 1, scale)
    results_of_stage: dict[tuple[str, int], _Results] = defaultdict(dict)

    def results(op: Op) -> _Results:  # B and I give the same result
        return results_of_stage["B" if op.kind == "I" else op.kind, op.stage]

    def build_rule(item: Item, stages: set[int]) -> _Rule:
        inputs = []
        for position, op in enumerate(item.parts):
            source = simple.need(op, schedule.num_stages - 1)
            if source is not None:
                need = Op(*source)
                delay = 0 if need.stage in stages else int(costs.communication / tick)
                inputs.append((position, results(need), delay))
        outputs = list(enumerate(map(results, item.parts)))
        return int(durations[_kind(item)] / tick), inputs, outputs

    rules = []
    for items in kinds:
        stages = {op.stage for item in items.values() for op in item.parts}
        rules.append({kind: build_rule(item, stages) for kind, item in items.items()})
    return tick, rules


def check_complete(schedule: Schedule) -> None:
    """Check orders from a file or a student: each operation occurs once, and each microbatch on a
    stage has a backward pass (B, or I and W). Raises ValueError otherwise."""
    if sum(map(len, schedule.flat)) > sum(map(len, schedule.microbatches_of.values())):
        ((op, _),) = Counter(schedule.ops()).most_common(1)
        raise ValueError(f"{op} appears twice in the orders")
    if all(
        kind == "F" for kind, _ in schedule.microbatches_of
    ):  # an order with only forward passes
        return
    for stage in {stage for _, stage in schedule.microbatches_of}:
        forwards, wholes, inputs, weights = (
            schedule.microbatches_of.get((k, stage), set()) for k in "FBIW"
        )
        for i in (wholes & inputs) | (inputs ^ weights) | (forwards - wholes - inputs):
            raise ValueError(
                f"stage {stage} needs either {stage}B{i} or both {stage}I{i} and {stage}W{i} "
                f"for microbatch {i}"
            )


def _deadlock_error(schedule: Schedule, ended: Sequence[int]) -> Exception:
    """Return an error that names a needed operation that no rank runs. If no operation is missing,
    return an error that names the cycle of ranks that wait for each other."""
    for op in schedule.ops():
        for need in schedule.needs(op):
            if need not in schedule:
                return ValueError(f"{op} needs {need}, which no rank runs")
    ranks = schedule.rank_by_op()
    lines = list(zip(schedule.orders, ended, strict=True))
    done = {op for order, count in lines for item in order[:count] for op in item.parts}
    waiting = {}
    for rank, (order, count) in enumerate(lines):
        if count < len(order):
            needs = ((op, n) for op in order[count].parts for n in schedule.needs(op))
            op, need = next((op, n) for op, n in needs if n not in done)
            waiting[rank] = f"{op}, which needs {need}", ranks[need]
    return DeadlockError(waiting)


def load_order(path: Path) -> Schedule:
    """Load a schedule from a CSV file, and check that the schedule is complete and can run. Raises
    UserError if the orders are incomplete or would deadlock."""
    schedule = load_csv(path)
    count = schedule.num_microbatches
    try:
        if set[int]().union(*schedule.microbatches_of.values()) != set(range(count)):
            raise ValueError(f"its {count} microbatches are not numbered from 0 to {count - 1}")
        if all(kind == "F" for kind, _ in schedule.microbatches_of):
            raise ValueError("it has no backward pass")
        if len(set(map(len, schedule.stages_by_rank()))) > 1:
            raise ValueError("its ranks have different numbers of stages")
        check_complete(schedule)
        simulate(repeat(schedule, 2), build_costs(schedule))
    except (DeadlockError, ValueError) as error:
        raise UserError(f"{path} cannot run: {error}", "fix the order in the file") from error
    return schedule
