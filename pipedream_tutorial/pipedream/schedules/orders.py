"""Define the table of all schedules. For each schedule, a function of p ranks and m microbatches
returns the order of every rank. This module does not import torch.

The schedules that a student reads first are in pipedream_simple.py. V-Half and V-Min are in
building_blocks.py. This file defines the schedules with pairs or with two copies of the model. The
papers are named in closed_forms.py. For schedules that torch.distributed.pipelining also provides,
our orders equal torch's orders (tests/test_torch.py).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pipedream_simple as simple

from pipedream.errors import UserError, nearest
from pipedream.schedules.building_blocks import v_half, v_min
from pipedream.schedules.ops import Item, Op, Orders, Schedule, build_from_orders, item_of, repeat
from pipedream.schedules.policies import POLICIES, Policy, weight_use

one_f_one_b = partial(simple.build, "1f1b")


def eager_1f1b(p: int, m: int) -> Orders:
    """Return the orders of Eager 1F1B: 1F1B with about twice as many warm-up forwards, so that
    messages have time to arrive."""
    words = [simple.in_turn("F" * m, "B" * m, 2 * (p - s) - 1) for s in range(p)]
    return simple.from_words(words)


def dualpipe_v(p: int, m: int) -> Orders:
    """Return the orders of DualPipeV. In this V-shaped schedule, a rank runs the forward pass of
    one microbatch together with the backward pass of another."""
    if m < 2 * p:
        raise UserError(
            f"dualpipe-v needs at least 2 microbatches per rank, not {m} for {p} ranks",
            f"set num_microbatches to {2 * p} or more",
        )
    return [_dualpipe_line(r, p, m) for r in range(p)]


def _dualpipe_line(r: int, p: int, m: int) -> list[Item]:
    """Return rank r's operations in the eight phases of DualPipe. Inside this function, lowercase
    letters stand for the rank's second stage."""
    steps = ["F"] * (2 * (p - 1 - r)) + ["F", "f"] * (r + 1) + ["i", "w", "f"] * (p - 1 - r)
    steps += ["Fb", "fB"] * (m - 2 * p + r + 1)
    if r == p - 1:  # the first backward must wait, so overlap would only delay its forward
        first = steps.index("Fb")
        steps[first : first + 1] = ["F", "b"]
    steps += ["b", "fB"] * (p - 1 - r)
    # 2 (r + 1) alternating backwards. W is delayed in the second half.
    backwards = "bB" * (r + 1)
    delayed = backwards[r + 1 :].replace("b", "i").replace("B", "I") + "I" * (p - 1 - r)
    weights = delayed.replace("i", "w").replace("I", "W")
    steps += backwards[: r + 1] + delayed[: r + 1]
    for pair in zip(weights, delayed[r + 1 :], strict=False):
        steps += pair
    # Each kind runs a stage's microbatches in order. A whole backward counts as both halves.
    counts: Counter[tuple[str, int]] = Counter()
    line: list[Item] = []
    for step in [*steps, *weights[p - 1 - r :]]:
        ops = []
        for letter in step:
            stage = r if letter.isupper() else 2 * p - 1 - r
            kinds = "IW" if letter in "bB" else letter.upper()
            ops.append(Op(letter.upper(), stage, counts[kinds[0], stage]))
            counts.update((kind, stage) for kind in kinds)
        line.append(item_of(ops))
    return line


def dualpipe(p: int, m: int) -> Orders:
    """Return DualPipe's orders for two copies of the model in opposite directions, each with half
    of the microbatches. DualPipe is DualPipeV on half as many ranks, unfolded: two mirrored ranks
    do the work of one. For the first copy, one of the two ranks runs the descending half of the V,
    and the other runs the ascending half. For the second copy, the roles are reversed."""
    if p % 2 or m % 2 or m < 2 * p:
        even = p + p % 2
        raise UserError(
            "dualpipe needs an even number of ranks and an even number of microbatches, with at "
            f"least 2 microbatches per rank, but p={p} and m={m}",
            f"use p={even} and m={max(2 * even, m + m % 2)}",
        )

    def unfolded(op: Op, r: int) -> Op:
        """Return the DualPipe operation that rank r runs in place of a DualPipeV operation. Rank r
        holds position r of the first copy of the model, and position p - 1 - r of the second
        copy."""
        return op if op.stage == r else Op(op.kind, p + op.stage, m // 2 + op.microbatch)

    lines: list[list[Item]] = []
    for r in range(p):
        folded = _dualpipe_line(min(r, p - 1 - r), p // 2, m // 2)
        lines.append([item_of([unfolded(op, r) for op in item.parts]) for item in folded])
    return lines


def chimera(p: int, m: int) -> Orders:
    """Return orders for two copies of the model in opposite directions, each with half of the
    microbatches. The batch consists of units of p microbatches. In a unit, each direction runs 1F1B
    with `p / 2` microbatches and fills the idle time of the other direction."""
    if p % 2 or m % p:
        raise UserError(
            f"chimera needs an even number of ranks and whole units of p microbatches, not p={p}, "
            f"m={m}",
            f"use p={p + p % 2} and a multiple of {p + p % 2} microbatches",
        )
    # When every operation takes one slot, stage s runs F of a direction's microbatch i in slot s +
    # 2 i and B in slot 2p - 1 - s + 2 i. A unit starts 2p slots after the previous unit. No rank
    # uses a slot twice. On each rank, the F slots of one direction have the same parity as the B
    # slots of the other direction, and p / 2 F slots alternate with p / 2 B slots.
    lines: list[list[tuple[int, simple.Op]]] = [[] for _ in range(p)]
    for microbatch in range(m):
        unit, index = divmod(microbatch, p)
        upwards, i = divmod(index, p // 2)
        begin = unit * 2 * p + 2 * i
        for s in range(p):
            rank, stage = (p - 1 - s, p + s) if upwards else (s, s)
            lines[rank] += [
                (begin + s, ("F", stage, microbatch)),
                (begin + 2 * p - 1 - s, ("B", stage, microbatch)),
            ]
    return [[op for _, op in sorted(line)] for line in lines]


@dataclass(frozen=True, slots=True)
class ScheduleSpec:
    """A schedule's title, orders and weight policy."""

    title: str
    orders: Callable[..., Orders]  # function of (p, m) and the named `options`
    policy: str = "flush"  # a key of policies.POLICIES
    options: tuple[str, ...] = ()
    copies: int = 1  # copies of the model; schedules with two copies can only be simulated


SCHEDULES: dict[str, ScheduleSpec] = {
    "naive": ScheduleSpec("Naive", partial(simple.build, "naive")),
    "gpipe": ScheduleSpec("GPipe", partial(simple.build, "gpipe")),
    "1f1b": ScheduleSpec("1F1B with flush", one_f_one_b),
    "eager-1f1b": ScheduleSpec("Eager 1F1B", eager_1f1b),
    "pipedream": ScheduleSpec("PipeDream", one_f_one_b, policy="stash"),
    "pipedream-vertical": ScheduleSpec("PipeDream, vertical sync", one_f_one_b, policy="vertical"),
    "pipedream-no-stash": ScheduleSpec("PipeDream, no stashing", one_f_one_b, policy="in-place"),
    "pipedream-2bw": ScheduleSpec("PipeDream-2BW", one_f_one_b, policy="2bw"),
    "interleaved": ScheduleSpec(
        "Interleaved 1F1B", partial(simple.build, "interleaved"), options=("v",)
    ),
    "zb-h1": ScheduleSpec("ZB-H1", partial(simple.build, "zb-h1")),
    "zb-h2": ScheduleSpec("ZB-H2", partial(simple.build, "zb-h2")),
    "zb-v": ScheduleSpec("ZB-V", partial(simple.build, "zb-v")),
    "v-half": ScheduleSpec("V-Half", v_half, options=("reorder",)),
    "v-min": ScheduleSpec("V-Min", v_min, options=("reorder",)),
    "dualpipe-v": ScheduleSpec("DualPipeV", dualpipe_v),
    "dualpipe": ScheduleSpec("DualPipe", dualpipe, copies=2),
    "chimera": ScheduleSpec("Chimera", chimera, copies=2),
}
TRAINABLE = tuple(name for name, entry in SCHEDULES.items() if entry.copies == 1)
SEARCH_PREFIX = "search-"
"""Prefix for the name of an order from a search. The limit on microbatches per rank follows."""


def build_schedule(name: str, p: int, m: int, v: int = 2, *, reorder: bool = True) -> Schedule:
    """Build the named schedule for p ranks and m microbatches. `v` is the number of chunks for
    interleaved 1F1B. Only V-Half and V-Min use `reorder`. Raises UserError for an unknown
    name and for sizes that the schedule does not allow."""
    entry = SCHEDULES.get(name)
    if entry is None:
        raise UserError(f"unknown schedule {name!r}", nearest(name, SCHEDULES))
    if min(p, m, v) < 1:
        raise UserError(f"p={p}, m={m} and v={v} are not accepted", "each must be 1 or more")
    option_values = {"v": v, "reorder": reorder}
    try:
        orders = entry.orders(p, m, **{option: option_values[option] for option in entry.options})
    except ValueError as error:  # pipedream_simple.py does not raise UserError
        raise UserError(*str(error).split("; ")) from None
    return build_from_orders(name, orders, entry.copies)


def schedule_for_training(
    name: str, num_stages: int, num_microbatches: int, num_batches: int
) -> tuple[Schedule, Policy]:
    """Return the schedule for all batches, and its weight policy. Batches of flushing schedules are
    repeated, and other schedules continue without a pause. Raises UserError for schedules that can
    only be simulated, for sizes that a schedule does not allow, and for 2BW with too few
    microbatches per batch."""
    if name in SCHEDULES and name not in TRAINABLE:
        raise UserError(
            f"{name} can only be simulated", f"train with one of {', '.join(TRAINABLE)}"
        )
    batch = build_schedule(name, num_stages, num_microbatches)
    policy = SCHEDULES[name].policy
    if policy == "flush":
        return repeat(batch, num_batches), POLICIES[policy]
    full_schedule = build_schedule(name, num_stages, num_microbatches * num_batches)
    # This raises an error if a pass would use a version that does not exist yet.
    weight_use(full_schedule, POLICIES[policy], num_microbatches)
    return full_schedule, POLICIES[policy]


def layers_per_stage(layers_per_rank: int, stages_per_rank: int) -> int:
    """Return the number of layers per stage. Raises UserError if the layers cannot be divided
    evenly."""
    if layers_per_rank % stages_per_rank:
        raise UserError(
            f"a rank's layers ({layers_per_rank}) cannot be cut into {stages_per_rank} stages",
            f"set layers_per_stage to a multiple of {stages_per_rank}",
        )
    return layers_per_rank // stages_per_rank
