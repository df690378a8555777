"""Define the table of all schedules. For each schedule, a function of p ranks and m microbatches
returns the order of every rank. This module does not import torch.

The schedules that a student reads first are in pipedream_simple.py. V-Half and V-Min are in
building_blocks.py. This file defines the other schedules. The
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
    counts: Counter[str] = Counter()
    line: list[Item] = []
    for step in [*steps, *weights[p - 1 - r :]]:
        ops = []
        for letter in step:
            stage = r if letter.isupper() else 2 * p - 1 - r
            halves = {"b": "iw", "B": "IW"}.get(letter, letter)
            ops.append(Op(letter.upper(), stage, counts[halves[0]]))
            for half in halves:
                counts[half] += 1
        line.append(item_of(ops))
    return line


@dataclass(frozen=True, slots=True)
class ScheduleSpec:
    """A schedule's title, orders and weight policy."""

    title: str
    orders: Callable[..., Orders]  # function of (p, m), and of v for interleaved 1F1B
    policy: str = "flush"  # a key of policies.POLICIES


SCHEDULES: dict[str, ScheduleSpec] = {
    "naive": ScheduleSpec("Naive", partial(simple.build, "naive")),
    "gpipe": ScheduleSpec("GPipe", partial(simple.build, "gpipe")),
    "1f1b": ScheduleSpec("1F1B with flush", one_f_one_b),
    "eager-1f1b": ScheduleSpec("Eager 1F1B", eager_1f1b),
    "pipedream": ScheduleSpec("PipeDream", one_f_one_b, policy="stash"),
    "pipedream-vertical": ScheduleSpec("PipeDream, vertical sync", one_f_one_b, policy="vertical"),
    "pipedream-no-stash": ScheduleSpec("PipeDream, no stashing", one_f_one_b, policy="in-place"),
    "pipedream-2bw": ScheduleSpec("PipeDream-2BW", one_f_one_b, policy="2bw"),
    "interleaved": ScheduleSpec("Interleaved 1F1B", partial(simple.build, "interleaved")),
    "zb-h1": ScheduleSpec("ZB-H1", partial(simple.build, "zb-h1")),
    "zb-h2": ScheduleSpec("ZB-H2", partial(simple.build, "zb-h2")),
    "zb-v": ScheduleSpec("ZB-V", partial(simple.build, "zb-v")),
    "v-half": ScheduleSpec("V-Half", v_half),
    "v-min": ScheduleSpec("V-Min", v_min),
    "dualpipe-v": ScheduleSpec("DualPipeV", dualpipe_v),
}
SEARCH_PREFIX = "search-"
"""Prefix for the name of an order from a search. The limit on microbatches per rank follows."""


def build_schedule(name: str, p: int, m: int, v: int = 2) -> Schedule:
    """Build the named schedule for p ranks and m microbatches. `v` is the number of chunks for
    interleaved 1F1B. Raises UserError for an unknown name and for sizes that the schedule does not
    allow."""
    entry = SCHEDULES.get(name)
    if entry is None:
        raise UserError(f"unknown schedule {name!r}", nearest(name, SCHEDULES))
    if min(p, m, v) < 1:
        raise UserError(f"p={p}, m={m} and v={v} are not accepted", "each must be 1 or more")
    try:
        orders = entry.orders(p, m, v) if name == "interleaved" else entry.orders(p, m)
    except ValueError as error:  # pipedream_simple.py does not raise UserError
        raise UserError(*str(error).split("; ")) from None
    return build_from_orders(name, orders)


def schedule_for_training(
    name: str, num_stages: int, num_microbatches: int, num_batches: int
) -> tuple[Schedule, Policy]:
    """Return the schedule for all batches, and its weight policy. Batches of flushing schedules are
    repeated, and other schedules continue without a pause. Raises UserError for
    sizes that a schedule does not allow, and for 2BW with too few microbatches per batch."""
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
