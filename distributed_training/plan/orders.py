"""Define the order of operations on each rank of a pipeline. This module does not import torch.

The orders match torch.distributed.pipelining (schedules.py in versions 2.11 to 2.13), with two
exceptions: `zb-v` uses its authors' order (zb_v.py), and planner/search.py finds the order for
`zb-auto`. An operation is (kind, stage, micro-batch). The kinds are "F" forward, "B" backward, "I"
backward for inputs only and "W" backward for weights only."""

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator

from distributed_training.plan.plan import Draft
from distributed_training.plan.schedules import FoundOrders
from distributed_training.plan.zb_v import build_words, mid_durations

Step = tuple[str, int]  # (kind, stage); the micro-batches of each such step run in sequence
Operation = tuple[str, int, int]
Order = tuple[Operation, ...]  # operations of one process


def find_orders(plan: Draft) -> tuple[Order, ...]:
    """Return each pipeline rank's order of operations. If the plan stores no orders, return the
    orders that the schedule defines."""
    if plan.orders is not None:
        return tuple(map(read_order, plan.orders.by_place))
    assert not plan.schedule.searched, "lay_out searches"
    schedule = plan.config.pipeline_schedule
    return build_orders(schedule, plan.mesh["pp"], plan.batch.num_microbatches)


@functools.cache
def build_orders(schedule: str, p: int, m: int) -> tuple[Order, ...]:
    """Return the order of operations on each of `p` pipeline ranks for `m` micro-batches."""
    if p == 1:  # one micro-batch after the other
        schedule = "1f1b"
    if schedule == "zb-v":
        return tuple(order_in_v(word, p, rank) for rank, word in enumerate(build_words(p, m)))
    return tuple(_one_f_one_b(schedule, p, m, rank) for rank in range(p))


def read_order(text: str) -> Order:
    """Parse an order such as "F0 F0 I7 W7" (kinds and stages)."""
    return _numbered((word[0], int(word[1:])) for word in text.split())


def _numbered(steps: Iterable[Step]) -> Order:
    """Add micro-batch numbers to the steps. Numbers are counted separately for each kind and
    stage."""
    numbers: dict[Step, Iterator[int]] = defaultdict(itertools.count)
    return tuple((kind, stage, next(numbers[kind, stage])) for kind, stage in steps)


def _one_f_one_b(schedule: str, p: int, m: int, rank: int) -> Order:
    """Return one rank's order: warm-up forward passes, then alternating forward and backward
    passes, then the remaining backward passes. With GPipe, the warm-up contains all forward
    passes."""
    local = 2 if schedule == "interleaved" else 1
    a_round = m // max(1, m // p)
    count = m * local
    ahead = min((local - 1) * a_round + local * (p - 1 - rank), count)
    if schedule == "gpipe":
        ahead = count
    splits = schedule == "zb-h1"
    order: list[Step] = []  # (kind, local stage)
    for step in range(count + ahead):
        if step < count:
            order.append(("F", step // a_round % local))
        if step >= ahead:
            order.append(("I" if splits else "B", local - 1 - (step - ahead) // a_round % local))
            if splits and step - ahead >= rank:
                order.append(("W", 0))
    if splits:
        order += [("W", 0)] * min(rank, m)
    return _numbered((kind, local_stage * p + rank) for kind, local_stage in order)


def order_in_v(word: str, p: int, rank: int) -> Order:
    """Convert a string of operation letters to an order. Lowercase letters denote operations on the
    rank's second stage."""
    second = 2 * p - 1 - rank
    return _numbered((x.upper(), rank if x.isupper() else second) for x in word)


def time_orders(
    seconds: tuple[tuple[float, float, float], ...], m: int, message_s: float
) -> FoundOrders:
    """Return the orders that `zb-v` uses for `m` micro-batches. `seconds` contains the durations of
    F, I and W for each stage."""
    p = len(seconds) // 2
    words = build_words(p, m, *mid_durations(seconds), message_s)
    orders = [order_in_v(word, p, rank) for rank, word in enumerate(words)]
    return FoundOrders(by_place=write_orders(orders), stage_s=seconds, message_s=message_s)


def write_orders(orders: Iterable[Iterable[Step | Operation]]) -> tuple[str, ...]:
    """Format each order in the form that `read_order` parses, such as "F0 F0 I7 W7"."""
    return tuple(" ".join(f"{step[0]}{step[1]}" for step in order) for order in orders)
