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

import pipedream_simple as simple

from pipedream.errors import UserError
from pipedream.schedules.ops import Item, Op, Pair, Schedule, straight, two_copies


def _named(name: str, orders: list[simple.Order], stages_per_rank: int = 1) -> Schedule:
    return straight(name, [list(map(Op._make, order)) for order in orders], stages_per_rank)


def naive(p: int, m: int) -> Schedule:
    """One microbatch in the pipeline at a time: all ranks but one are idle."""
    return _named("naive", simple.naive(p, m))


def gpipe(p: int, m: int) -> Schedule:
    """All forwards, then all backwards."""
    return _named("gpipe", simple.gpipe(p, m))


def one_f_one_b(p: int, m: int) -> Schedule:
    """p - s forwards on stage s to fill the pipeline, then a backward for each forward."""
    return _named("1f1b", simple.one_f_one_b(p, m))


def eager_1f1b(p: int, m: int) -> Schedule:
    """1F1B that runs further ahead, 2 (p - s) - 1 forwards on stage s, so that messages have time
    to arrive."""
    words = [simple.alternating(m, ahead=2 * (p - 1 - s)) for s in range(p)]
    return _named("eager-1f1b", simple.from_words(words))


def interleaved_1f1b(p: int, m: int, v: int) -> Schedule:
    """v stages a rank, p apart: microbatches go round the ranks v times."""
    try:
        return _named("interleaved", simple.interleaved(p, m, v), v)
    except ValueError as error:
        raise UserError(*str(error).split("; ")) from None


def zb_h1(p: int, m: int) -> Schedule:
    """1F1B with the backward pass cut in two: W waits where the rank would idle."""
    return _named("zb-h1", simple.zb_h1(p, m))


def zb_h2(p: int, m: int) -> Schedule:
    """Twice the forwards ahead of ZB-H1, so that nothing is left to wait for; W fills the end."""
    return _named("zb-h2", simple.zb_h2(p, m))


def zb_v(p: int, m: int) -> Schedule:
    """Two stages a rank in a V: rank 0 holds the first and the last stage."""
    return _named("zb-v", simple.zb_v(p, m), 2)


class _Line:
    """One rank's order while it is written: microbatches are counted by stage and kind."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.count: Counter[tuple[str, int]] = Counter()

    def next(self, kind: str, stage: int) -> Op:
        """The stage's next operation of a kind; a whole backward pass counts as its halves."""
        op = Op(kind, stage, self.count["I" if kind == "B" else kind, stage])
        for counted in "IW" if kind == "B" else kind:
            self.count[counted, stage] += 1
        return op

    def add(self, kind: str, stage: int) -> None:
        self.items.append(self.next(kind, stage))

    def add_pair(self, forward_stage: int, backward_stage: int) -> None:
        self.items.append(Pair(self.next("F", forward_stage), self.next("B", backward_stage)))


def _add(line: _Line, steps: list[tuple[str, int]], times: int = 1) -> None:
    for _ in range(times):
        for kind, stage in steps:
            line.add(kind, stage)


def dualpipe_v(p: int, m: int) -> Schedule:
    """Stages in a V, and a forward of one microbatch run together with a backward of another."""
    if m < 2 * p:
        raise UserError(
            f"dualpipe-v needs at least 2 microbatches a rank, not {m} for {p} ranks",
            f"set num_microbatches to {2 * p} or more",
        )
    lines = [_dualpipe_line(r, p, m) for r in range(p)]
    return straight("dualpipe-v", lines, 2)


def _dualpipe_line(r: int, p: int, m: int) -> list[Item]:
    """DualPipe's eight phases on the two stages of rank r."""
    line = _Line()
    down = r
    up = 2 * p - 1 - r
    pending: deque[int] = deque()

    def cut_backward(stage: int) -> None:
        line.add("I", stage)
        pending.append(stage)

    def late_weight() -> None:
        if pending:
            line.add("W", pending.popleft())

    _add(line, [("F", down)], 2 * (p - 1 - r))
    _add(line, [("F", down), ("F", up)], r + 1)
    for _ in range(p - 1 - r):
        cut_backward(up)
        late_weight()
        line.add("F", up)
    for step in range(m - 2 * p + r + 1):
        if step == 0 and r == p - 1:  # its backward has to wait anyway: overlap would only delay
            _add(line, [("F", down), ("B", up)])
        else:
            line.add_pair(down, up)
        line.add_pair(up, down)
    for _ in range(p - 1 - r):
        line.add("B", up)
        line.add_pair(up, down)
    # 2 (r + 1) backwards, alternating; from the middle on their W is put off.
    middle = r + 1 if r % 2 else (r + 1) // 2 * 2 + 1
    for step in range(2 * (r + 1)):
        stage = down if step % 2 else up
        if step >= middle:
            cut_backward(stage)
        else:
            line.add("B", stage)
    for _ in range(p - 1 - r):
        late_weight()
        if 2 * (r + 1) > middle:
            cut_backward(down)
        else:
            line.add("B", down)
    for _ in range(r + 1):
        late_weight()
    return line.items


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
