"""The schedules: each a short function from (ranks p, microbatches m) to an order per rank.

Those that a student reads first are written in pipedream_simple.py; here are their names, and the
schedules of two stages a rank or two copies of the model. Sources: GPipe (arXiv 1811.06965),
PipeDream and PipeDream-2BW (1806.03377, 2006.09503), interleaved 1F1B (Megatron-LM, 2104.04473),
zero bubble (2401.10241), Chimera (2107.06925), DualPipe (DeepSeek-V3, 2412.19437) in its V form.
Where torch.distributed.pipelining has the schedule, the order is the same as torch's
(tests/test_torch.py).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

import pipedream_simple as simple

from pipedream.errors import UserError
from pipedream.schedules.ops import Item, Op, Pair, Schedule, straight, two_copies


def named(name: str, orders: list[simple.Order]) -> Schedule:
    """Orders of pipedream_simple.py as a schedule."""
    return straight(name, [list(map(Op._make, order)) for order in orders])


def _from_simple(
    name: str, build: Callable[[int, int], list[simple.Order]]
) -> Callable[[int, int], Schedule]:
    return lambda p, m: named(name, build(p, m))


naive = _from_simple("naive", simple.naive)
gpipe = _from_simple("gpipe", simple.gpipe)
one_f_one_b = _from_simple("1f1b", simple.one_f_one_b)
zb_h1 = _from_simple("zb-h1", simple.zb_h1)
zb_h2 = _from_simple("zb-h2", simple.zb_h2)
zb_v = _from_simple("zb-v", simple.zb_v)
# 1F1B that runs further ahead, so that messages have time to arrive.
eager_1f1b = _from_simple(
    "eager-1f1b",
    lambda p, m: simple.from_words([simple.alternating(m, 2 * (p - 1 - s)) for s in range(p)]),
)


def interleaved_1f1b(p: int, m: int, v: int) -> Schedule:
    """v stages a rank, p apart: microbatches go round the ranks v times."""
    try:
        return named("interleaved", simple.interleaved(p, m, v))
    except ValueError as error:
        raise UserError(*str(error).split("; ")) from None


def dualpipe_v(p: int, m: int) -> Schedule:
    """Stages in a V, and a forward of one microbatch run together with a backward of another."""
    if m < 2 * p:
        raise UserError(
            f"dualpipe-v needs at least 2 microbatches a rank, not {m} for {p} ranks",
            f"set num_microbatches to {2 * p} or more",
        )
    lines = [_dualpipe_line(r, p, m) for r in range(p)]
    return straight("dualpipe-v", lines)


def _dualpipe_line(r: int, p: int, m: int) -> list[Item]:
    """DualPipe's eight phases on the two stages of rank r."""
    down = r
    up = 2 * p - 1 - r
    items: list[Item] = []
    done: Counter[tuple[str, int]] = Counter()
    pending: deque[int] = deque()

    def following(kind: str, stage: int) -> Op:
        """The stage's next operation of a kind; a whole backward pass counts as its halves."""
        op = Op(kind, stage, done["I" if kind == "B" else kind, stage])
        done.update((counted, stage) for counted in ("IW" if kind == "B" else kind))
        return op

    def run(times: int, *steps: tuple[str, int]) -> None:
        for _ in range(times):
            items.extend(following(*step) for step in steps)

    def pair(forward_stage: int, backward_stage: int) -> None:
        items.append(Pair(following("F", forward_stage), following("B", backward_stage)))

    def cut_backward(stage: int) -> None:
        run(1, ("I", stage))
        pending.append(stage)

    def late_weight() -> None:
        if pending:
            run(1, ("W", pending.popleft()))

    run(2 * (p - 1 - r), ("F", down))
    run(r + 1, ("F", down), ("F", up))
    for _ in range(p - 1 - r):
        cut_backward(up)
        late_weight()
        run(1, ("F", up))
    for step in range(m - 2 * p + r + 1):
        if step == 0 and r == p - 1:  # its backward has to wait anyway: overlap would only delay
            run(1, ("F", down), ("B", up))
        else:
            pair(down, up)
        pair(up, down)
    for _ in range(p - 1 - r):
        run(1, ("B", up))
        pair(up, down)
    # 2 (r + 1) backwards, alternating; from the middle on their W is put off.
    middle = r + 1 if r % 2 else (r + 1) // 2 * 2 + 1
    for step in range(2 * (r + 1)):
        stage = down if step % 2 else up
        if step >= middle:
            cut_backward(stage)
        else:
            run(1, ("B", stage))
    for _ in range(p - 1 - r):
        late_weight()
        if 2 * (r + 1) > middle:
            cut_backward(down)
        else:
            run(1, ("B", down))
    for _ in range(r + 1):
        late_weight()
    return items


def dualpipe(p: int, m: int) -> Schedule:
    """DualPipe with two copies of the model in opposite directions, half of the microbatches each.

    DualPipeV on half as many ranks, unfolded: its way down the V is on one rank of a pair that
    mirror each other, its way up on the other, and for the second copy the other way round.
    """
    if p % 2 or m % 2 or m < 2 * p:
        least = 2 * (p + p % 2)
        raise UserError(
            f"dualpipe needs an even number of ranks, and an even number of microbatches, 2 a rank "
            f"or more, not p={p}, m={m}",
            f"take p={p + p % 2} and m={max(least, m + m % 2)}",
        )
    lines = [
        _unfolded(_dualpipe_line(min(r, p - 1 - r), p // 2, m // 2), r, p, m) for r in range(p)
    ]
    return two_copies("dualpipe", lines)


def _unfolded(line: list[Item], r: int, p: int, m: int) -> list[Item]:
    """Place r of the model is the first copy's on rank r; the other place the second copy's."""

    def moved(op: Op) -> Op:
        if op.stage == r:
            return op
        return Op(op.kind, p + op.stage, m // 2 + op.microbatch)

    return [Pair(*map(moved, i.parts)) if isinstance(i, Pair) else moved(i) for i in line]


def chimera(p: int, m: int) -> Schedule:
    """Two copies of the model in opposite directions, half of the microbatches through each.

    Units of p microbatches; in a unit each direction is a 1F1B of p / 2 microbatches, and what
    one leaves idle the other fills.
    """
    if p % 2 or m % p:
        raise UserError(
            f"chimera needs an even number of ranks and whole units of p microbatches, not p={p}, "
            f"m={m}",
            f"take p={p + p % 2} and a multiple of it",
        )
    # When every operation takes one slot, stage s runs F of a direction's microbatch i in slot
    # s + 2 i and B in slot 2p - 1 - s + 2 i; a unit starts 2p slots after the one before it. No
    # rank gets a slot twice: one direction's slots are even where the other's are odd.
    lines: list[list[tuple[int, Op]]] = [[] for _ in range(p)]
    for microbatch in range(m):
        unit, place = divmod(microbatch, p)
        upwards, i = divmod(place, p // 2)
        begin = unit * 2 * p + 2 * i
        for s in range(p):
            rank, stage = (p - 1 - s, p + s) if upwards else (s, s)
            lines[rank] += [
                (begin + s, Op("F", stage, microbatch)),
                (begin + 2 * p - 1 - s, Op("B", stage, microbatch)),
            ]
    return two_copies("chimera", [[op for _, op in sorted(line)] for line in lines])
