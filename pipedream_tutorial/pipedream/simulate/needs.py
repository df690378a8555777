"""What an operation waits for, which orders are whole, and which wait in a circle.

F of a stage     needs F of the stage before it
B, I of a stage  need B or I of the stage after it, and this stage's own F
W of a stage     needs this stage's own I
R of a stage     needs this stage's own F, and where there is an R, B and I need it instead of F
"""

from __future__ import annotations

from itertools import pairwise

from pipedream.schedules.ops import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    RECOMPUTE,
    WEIGHT_GRADIENT,
    Op,
    Schedule,
)

Key = tuple[str, int, int]
"""An Op's fields; equal to the Op, and quicker to make."""


class DeadlockError(RuntimeError):
    """The orders can never all run: some operations wait for each other in a circle."""

    def __init__(self, cycle: list[Op], text: str) -> None:
        super().__init__(text)
        self.cycle = cycle


def needs(op: Op, schedule: Schedule) -> list[Op]:
    """The operations whose results this one takes in, those on its own stage included."""
    return Needs(schedule).of(op)


class Needs:
    """Finds what operations wait for, knowing which kinds the schedule uses."""

    def __init__(self, schedule: Schedule) -> None:
        self.halves: set[tuple[int, int]] = set()
        self.again: set[tuple[int, int]] = set()
        for kind, stage, i in schedule.ops():
            if kind == INPUT_GRADIENT:
                self.halves.add((stage, i))
            elif kind == RECOMPUTE:
                self.again.add((stage, i))
        self.after = {a: b for chain in schedule.chains for a, b in pairwise(chain)}
        self.before = {b: a for a, b in self.after.items()}

    def of(self, op: Op) -> list[Op]:
        return [Op._make(key) for key in self.keys(op)]

    def keys_of(self, parts: tuple[Op, ...]) -> tuple[Key, ...]:
        if len(parts) == 1:
            return self.keys(parts[0])
        return tuple(key for op in parts for key in self.keys(op))

    def keys(self, op: Op) -> tuple[Key, ...]:
        kind, stage, microbatch = op
        if kind == FORWARD:
            previous = self.before.get(stage)
            return () if previous is None else ((FORWARD, previous, microbatch),)
        if kind == WEIGHT_GRADIENT:
            return ((INPUT_GRADIENT, stage, microbatch),)
        if kind == RECOMPUTE:
            return ((FORWARD, stage, microbatch),)
        own = (RECOMPUTE if (stage, microbatch) in self.again else FORWARD, stage, microbatch)
        following = self.after.get(stage)
        if following is None:
            return (own,)
        cut = (following, microbatch) in self.halves
        return own, (INPUT_GRADIENT if cut else BACKWARD, following, microbatch)


def check_once_and_whole(schedule: Schedule, wanted: Needs) -> None:
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


def check_needs(schedule: Schedule, wanted: Needs) -> None:
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


def deadlock(
    schedule: Schedule, ended: list[int], wanted: Needs, done: dict[Key, tuple[int, int]]
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
