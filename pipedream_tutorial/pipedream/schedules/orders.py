"""The schedules: each a short function from (ranks p, microbatches m) to an order per rank.

Those that a student reads first are written in pipedream_simple.py; here are their names, and those
of pairs or of two copies of the model. Sources: GPipe (arXiv 1811.06965), PipeDream and
PipeDream-2BW (1806.03377, 2006.09503), interleaved 1F1B (Megatron-LM, 2104.04473), zero bubble
(2401.10241), Chimera (2107.06925), DualPipe (DeepSeek-V3, 2412.19437) in its V form. Where
torch.distributed.pipelining has the schedule, the order is the same as torch's
(tests/test_torch.py).
"""

from collections import Counter
from functools import partial

import pipedream_simple as simple

from pipedream.errors import UserError
from pipedream.schedules.ops import Item, Op, Schedule, item_of, straight


def named(name: str, orders: list[simple.Order]) -> Schedule:
    """Orders of pipedream_simple.py as a schedule."""
    return straight(name, [list(map(Op._make, order)) for order in orders])


def _from_simple(name: str, p: int, m: int, v: int = 2) -> Schedule:
    try:
        return named(name, simple.build(name, p, m, v))
    except ValueError as error:
        raise UserError(*str(error).split("; ")) from None


naive = partial(_from_simple, "naive")
gpipe = partial(_from_simple, "gpipe")
one_f_one_b = partial(_from_simple, "1f1b")
interleaved_1f1b = partial(_from_simple, "interleaved")
zb_h1 = partial(_from_simple, "zb-h1")
zb_h2 = partial(_from_simple, "zb-h2")
zb_v = partial(_from_simple, "zb-v")


def eager_1f1b(p: int, m: int) -> Schedule:
    """1F1B that runs twice as far ahead, so that messages have time to arrive."""
    words = [simple.in_turn("F" * m, "B" * m, 2 * (p - 1 - s)) for s in range(p)]
    return named("eager-1f1b", simple.from_words(words))


def dualpipe_v(p: int, m: int) -> Schedule:
    """Stages in a V, and a forward of one microbatch run together with a backward of another."""
    if m < 2 * p:
        raise UserError(
            f"dualpipe-v needs at least 2 microbatches a rank, not {m} for {p} ranks",
            f"set num_microbatches to {2 * p} or more",
        )
    return straight("dualpipe-v", [_dualpipe_line(r, p, m) for r in range(p)])


def _dualpipe_line(r: int, p: int, m: int) -> list[Item]:
    """DualPipe's eight phases on rank r, whose second stage is written in small letters."""
    steps = ["F"] * (2 * (p - 1 - r)) + ["F", "f"] * (r + 1) + ["i", "w", "f"] * (p - 1 - r)
    steps += ["Fb", "fB"] * (m - 2 * p + r + 1)
    if r == p - 1:  # the first backward has to wait anyway: overlap would only delay its forward
        first = steps.index("Fb")
        steps[first : first + 1] = ["F", "b"]
    steps += ["b", "fB"] * (p - 1 - r)
    # 2 (r + 1) backwards, alternating; from the middle on their W is put off.
    backwards = ["b", "B"] * (r + 1)
    late = ["i" if backward == "b" else "I" for backward in backwards[r + 1 :]]
    late += ["I"] * (p - 1 - r)
    weights = ["w" if gradient == "i" else "W" for gradient in late]
    steps += backwards[: r + 1] + late[: r + 1]
    for weight, gradient in zip(weights, late[r + 1 :], strict=False):
        steps += [weight, gradient]
    return _numbered(steps + weights[p - 1 - r :], down=r, up=2 * p - 1 - r)


def _numbered(steps: list[str], *, down: int, up: int) -> list[Item]:
    """Each kind takes a stage's microbatches in turn; a whole backward counts as its halves."""
    done: Counter[tuple[str, int]] = Counter()
    items: list[Item] = []
    for step in steps:
        ops = []
        for letter in step:
            stage = down if letter.isupper() else up
            kinds = "IW" if letter in "bB" else letter.upper()
            ops.append(Op(letter.upper(), stage, done[kinds[0], stage]))
            done.update((kind, stage) for kind in kinds)
        items.append(item_of(ops))
    return items


def dualpipe(p: int, m: int) -> Schedule:
    """DualPipe with two copies of the model in opposite directions, half of the microbatches each.

    DualPipeV on half as many ranks, unfolded: its way down the V is on one rank of a pair that
    mirror each other, its way up on the other, and for the second copy the other way round.
    """
    if p % 2 or m % 2 or m < 2 * p:
        even = p + p % 2
        raise UserError(
            f"dualpipe needs an even number of ranks, and an even number of microbatches, 2 a rank "
            f"or more, not p={p}, m={m}",
            f"take p={even} and m={max(2 * even, m + m % 2)}",
        )

    def unfolded(op: Op, r: int) -> Op:
        """Place r of the model is the first copy's on rank r; the other place the second copy's."""
        return op if op.stage == r else Op(op.kind, p + op.stage, m // 2 + op.microbatch)

    lines: list[list[Item]] = []
    for r in range(p):
        folded = _dualpipe_line(min(r, p - 1 - r), p // 2, m // 2)
        lines.append([item_of([unfolded(op, r) for op in item.parts]) for item in folded])
    return straight("dualpipe", lines, copies=2)


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
    return straight("chimera", [[op for _, op in sorted(line)] for line in lines], copies=2)
