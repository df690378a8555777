"""V-Min and V-Half: one microbatch's slots, written down once and repeated (arXiv 2405.15362).

Two stages a rank in a V, as in ZB-V. Each of a rank's six operations of a microbatch takes one
slot, so the next microbatch's block comes 6 slots later and a rank without a gap is busy. A block
gives four slots; the two W go where the rank would idle. How long activations live in a block is
how many microbatches overlap, so the block alone decides the memory: in V-Min neighbours follow
each other after one slot, which takes about p / 3; V-Half has two slots between the first stages'
forwards and between the last ones' backwards, which takes p / 2 and idles less.

The paper then also moves operations forward while the pipeline fills and drains, within the same
memory. That is left out: it would hide the block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

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
