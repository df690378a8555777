"""Define the order of operations on each rank of a pipeline. This module does not import torch.

The orders match torch.distributed.pipelining (schedules.py in versions 2.11 to 2.14). An operation
is (kind, stage, micro-batch). The kinds are "F" (forward), "B" (backward), "I" (backward for inputs
only) and "W" (backward for weights only)."""

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator

from distributed_training.plan.plan import Draft

Step = tuple[str, int]  # (kind, stage); the micro-batches of each such step run in sequence
Operation = tuple[str, int, int]
Order = tuple[Operation, ...]  # operations of one rank


def find_orders(plan: Draft) -> tuple[Order, ...]:
    """Return each pipeline rank's order of operations."""
    return build_orders(plan.config.pipeline_schedule, plan.mesh["pp"], plan.batch.num_microbatches)


@functools.cache
def build_orders(schedule: str, p: int, m: int) -> tuple[Order, ...]:
    """Return the order of operations on each of `p` pipeline ranks for `m` micro-batches."""
    if p == 1:  # Without a pipeline, micro-batches run one after another.
        schedule = "1f1b"
    if schedule == "zb-v":
        return tuple(_build_zb_v_order(p, m, rank) for rank in range(p))
    return tuple(_build_1f1b_order(schedule, p, m, rank) for rank in range(p))


def _number_micro_batches(steps: Iterable[Step]) -> Order:
    """Add micro-batch numbers to the steps. Micro-batches are numbered separately for each kind and
    stage."""
    numbers: dict[Step, Iterator[int]] = defaultdict(itertools.count)
    return tuple((kind, stage, next(numbers[kind, stage])) for kind, stage in steps)


def _build_1f1b_order(schedule: str, p: int, m: int, rank: int) -> Order:
    """Return one rank's order: warm-up forward passes, then alternating forward and backward
    passes, then the remaining backward passes. With GPipe, the warm-up contains all forward
    passes."""
    stages_per_rank = 2 if schedule == "interleaved" else 1
    round_size = m // max(1, m // p)
    num_forwards = m * stages_per_rank
    num_warmup = min(
        (stages_per_rank - 1) * round_size + stages_per_rank * (p - 1 - rank), num_forwards
    )
    if schedule == "gpipe":
        num_warmup = num_forwards
    splits_backward = schedule == "zb-h1"
    order = []  # (kind, local stage)
    for step in range(num_forwards + num_warmup):
        if step < num_forwards:
            order.append(("F", step // round_size % stages_per_rank))
        if step >= num_warmup:
            order.append(
                (
                    "I" if splits_backward else "B",
                    stages_per_rank - 1 - (step - num_warmup) // round_size % stages_per_rank,
                )
            )
            if splits_backward and step - num_warmup >= rank:
                order.append(("W", 0))
    if splits_backward:
        order += [("W", 0)] * min(rank, m)
    return _number_micro_batches((kind, local_stage * p + rank) for kind, local_stage in order)


def _build_zb_v_order(p: int, m: int, rank: int) -> Order:
    """Return one rank's order under ZB-V. The order is built for at least `2 * p - 1`
    micro-batches, and the operations of those beyond `m` are left out."""
    num_padded = max(2 * p - 1, m)
    # Lowercase letters denote operations on the rank's second stage.
    steps = "F" * (2 * (p - rank) - 1) + "fF" * rank + "fiw" * (p - rank)
    steps += "FIWfiw" * (num_padded - (2 * p - 1 - rank)) + "IWfiw" * (p - 1 - rank)
    steps += "Ii" * rank + "IW" * (p - rank) + "w" * rank + "W" * rank
    second_stage = 2 * p - 1 - rank
    order = _number_micro_batches(
        (letter.upper(), rank if letter.isupper() else second_stage) for letter in steps
    )
    return tuple(step for step in order if step[2] < m)
