"""V-Min and V-Half: one microbatch's slots, written down once and repeated (arXiv 2405.15362).

Two stages a rank in a V, as in ZB-V. Each of a rank's six operations of a microbatch takes one
slot, so the next microbatch's block comes 6 slots later and a rank without a gap is busy. A block
gives four slots; the two W go where the rank would idle. How long activations live in a block is
how many microbatches overlap, so the block alone decides the memory: in V-Min neighbours follow
each other after one slot, which takes about p / 3; V-Half has two slots between the first stages'
forwards and between the last ones' backwards, which takes p / 2 and idles less.

As a last step the paper moves operations forward while the pipeline fills and drains, within the
same memory: `reordered`, which is asked for, since it hides the block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from pipedream.schedules.ops import Item, Op, Schedule, as_orders, one_chain

SLOTS = 6

Block = Callable[[int], tuple[int, int, int, int]]
"""rank -> slots of microbatch 0: F on the way down, F on the way up, I down the V, I up again."""


def v_min(p: int, m: int) -> Schedule:
    """A third of 1F1B's activations: every operation is one slot after its neighbour's."""
    pause = 0 if p % 3 else 2  # else two operations of a rank would want the same slot
    return _repeated(
        "v-min", p, m, lambda r: (r, 2 * p - 1 - r, 2 * p + pause + r, 4 * p + pause - 1 - r)
    )


def v_half(p: int, m: int) -> Schedule:
    """Half of 1F1B's activations: two slots between neighbours wherever the way leads down."""
    pause = 0 if p % 2 else 3  # likewise
    return _repeated(
        "v-half",
        p,
        m,
        lambda r: (2 * r, 3 * p - 2 - r, 3 * p + pause - 1 + 2 * r, 6 * p + pause - 2 - r),
    )


def _repeated(name: str, p: int, m: int, block: Block) -> Schedule:
    """The block m times, 6 slots apart; W, first come first served, in the slots left free."""
    lines = []
    for r in range(p):
        down, up = r, 2 * p - 1 - r
        steps = (("F", down), ("F", up), ("I", up), ("I", down))
        taken = {
            slot + SLOTS * i: Op(kind, stage, i)
            for (kind, stage), slot in zip(steps, block(r), strict=True)
            for i in range(m)
        }
        line: list[Item] = []
        waiting: deque[Op] = deque()
        for slot in range(max(taken) + 2 * m + 1):
            op = taken.get(slot)
            if op is not None:
                line.append(op)
                if op.kind == "I":
                    waiting.append(Op("W", op.stage, op.microbatch))
            elif waiting:
                line.append(waiting.popleft())
        lines.append(line)
    return Schedule(name=name, orders=as_orders(lines), chains=one_chain(2 * p), stages_per_rank=2)


def reordered(schedule: Schedule) -> Schedule:
    """The same operations, those of the filling and draining pipeline sooner where memory allows.

    Every operation takes one slot. A rank whose next operation cannot start yet runs the first
    later one that can, unless the rank would then ever hold more than the fullest rank did. While
    the pipeline is full no rank waits, and nothing is moved. The backward passes have to be cut.
    """
    last = len(schedule.chains[0]) - 1
    left = [[op for item in order for op in item.parts] for order in schedule.orders]
    limit = max(_most_held(order, 0) for order in left)
    lines: list[list[Item]] = [[] for _ in left]
    held = [0] * len(left)
    done: set[Op] = set()
    while any(left):
        running = []
        for rank, order in enumerate(left):
            place = _first_to_run(order, done, last, limit - held[rank])
            if place is not None:
                op = order.pop(place)
                held[rank] += _HELD[op.kind]
                lines[rank].append(op)
                running.append(op)
        done.update(running)
    return replace(schedule, orders=as_orders(lines))


_HELD = {"F": 1, "I": 0, "W": -1}


def _most_held(order: Sequence[Op], held: int) -> int:
    return max(accumulate((_HELD[op.kind] for op in order), initial=held))


def _first_to_run(order: Sequence[Op], done: set[Op], last: int, room: int) -> int | None:
    """Its place in the order; None where nothing can start. `room`: forwards that still fit."""
    most = held = 0
    for place, op in enumerate(order):
        own = _HELD[op.kind]
        if (place == 0 or most + own <= room) and _waits_for(op, last) <= done:
            return place
        held += own
        most = max(most, held)
    return None


def _waits_for(op: Op, last: int) -> set[Op]:
    kind, stage, i = op
    if kind == "F":
        return {Op("F", stage - 1, i)} if stage else set()
    if kind == "I":
        return {Op("I", stage + 1, i) if stage < last else Op("F", stage, i)}
    return {Op("I", stage, i)}
