"""Search for the order of operations for the pipeline schedule `zb-auto`.

This module does not import torch."""

import functools
import math
import random
from collections.abc import Callable

from distributed_training.plan.orders import Step, build_orders, number_micro_batches
from distributed_training.plan.schedules import SCHEDULES, TimedOrders
from distributed_training.predict.simulate import (
    durations_by_step,
    map_consumers,
    simulate,
    total_duration,
)

# Parameters of the search, tuned with durations of gpt2-medium on 4 H200 GPUs (commit 3f6f234) for
# 2 to 8 ranks and 1 to 32 micro-batches.
CHANGES_PER_OPERATION = 150  # changes tested per operation
MAX_SIMULATED = 5_000_000  # maximum number of simulated operations; a search takes 1 to 2 s
MAX_OFFSET = 6  # maximum number of positions by which an operation is moved
SINGLE_MOVE_SHARE = 0.3  # fraction of changes that move one operation, not one per period
INITIAL_THRESHOLD = 0.16  # initial limit on the slowdown from a change, in mean operation durations


@functools.cache
def search_orders(
    seconds: tuple[tuple[float, float, float], ...],
    blocks: tuple[int, ...],
    m: int,
    message_s: float,
) -> TimedOrders:
    """Return the fastest order found for `m` micro-batches under `zb-auto`. In the simulation, this
    order is never slower than the order of `zb-v`.

    `seconds` contains the durations of F, I and W in seconds for each stage. `blocks` contains the
    number of blocks in each stage. A micro-batch holds the activations of these blocks from F to W.
    Rank `r` of `p` has the stages `r` and `2 * p - 1 - r`. `message_s` is the time in seconds to
    send a result to another rank.

    The order of `zb-v` assumes equal stages, but the last stage also computes the loss. Threshold
    accepting with random, decreasing thresholds improves this order. The same arguments give the
    same order on any machine, because the search uses only basic floating-point operations and
    `random()`. The sequence of `random()` does not depend on the Python version."""
    last_stage = len(blocks) - 1
    p = len(blocks) // 2
    durations = durations_by_step(seconds)
    # The last stage runs I right after F, before the logits of another micro-batch exist.
    fused_step = ("I", last_stage)
    durations["F", last_stage] += durations[fused_step]
    consumers = map_consumers(SCHEDULES["zb-v"].ranks(p), message_s)
    consumers["F", last_stage] = consumers.pop(fused_step)
    orders = [
        [step[:2] for step in order if step[:2] != fused_step]
        for order in build_orders("zb-auto", p, m)
    ]
    kept_micro_batches = SCHEDULES["zb-auto"].kept_micro_batches(p, m)
    max_blocks = []
    for rank, steps in enumerate(orders):
        kept_blocks = kept_micro_batches * (blocks[rank] + blocks[-1 - rank])
        max_blocks.append(max(_max_held_blocks(steps, blocks) or 0, kept_blocks))

    by_place = []
    for order in _improve(orders, m, durations, consumers, blocks, max_blocks):
        steps = []
        for step in order:
            steps.append(step)
            if step == ("F", last_stage):
                steps.append(fused_step)
        by_place.append(number_micro_batches(steps))
    return TimedOrders(by_place=tuple(by_place), stage_s=seconds, message_s=message_s)


def _max_held_blocks(
    steps: list[Step],
    blocks: tuple[int, ...],
) -> int | None:
    """Return the largest number of blocks whose activations a rank holds at once. Return None if an
    operation comes before the operation that produces its input."""
    last_stage = len(blocks) - 1
    num_runs = dict.fromkeys(steps, 0)  # number of times that each step has run
    held_blocks = max_held = 0
    for step in steps:
        kind, stage = step
        num_runs[step] += 1
        if kind == "F":
            held_blocks += blocks[stage]
            max_held = max(max_held, held_blocks)
            continue
        if kind == "W":
            held_blocks -= blocks[stage]
        source = "I" if kind == "W" and stage != last_stage else "F"
        if num_runs[step] > num_runs[source, stage]:
            return None
    return max_held


def _improve(
    orders: list[list[Step]],
    m: int,
    durations: dict[Step, float],
    consumers: dict[Step, tuple[Step, float]],
    blocks: tuple[int, ...],
    max_blocks: list[float],
) -> list[list[Step]]:
    """Return the fastest orders that threshold accepting finds from `orders`. `max_blocks` limits
    how many blocks' activations each rank holds at once."""
    draw = random.Random(0).random
    best = list(orders)
    current_duration = best_duration = total_duration(simulate(orders, durations, consumers))
    initial_threshold = INITIAL_THRESHOLD * math.fsum(durations.values()) / len(durations)
    count = sum(map(len, orders))
    num_iterations = min(CHANGES_PER_OPERATION * count, MAX_SIMULATED // count)
    for iteration in range(num_iterations):
        rank = int(draw() * len(orders))
        old = orders[rank]
        new = _move_operations(old, m, draw)
        held_blocks = _max_held_blocks(new, blocks)
        if new == old or held_blocks is None or held_blocks > max_blocks[rank]:
            continue
        orders[rank] = new
        threshold = initial_threshold * (1 - iteration / num_iterations) * draw()
        duration = total_duration(simulate(orders, durations, consumers))
        if duration > current_duration + threshold:
            orders[rank] = old
            continue
        current_duration = duration
        if current_duration < best_duration:
            best_duration = current_duration
            best = list(orders)
    return best


def _move_operations(
    order: list[Step],
    m: int,
    draw: Callable[[], float],
) -> list[Step]:
    """Return a copy of a rank's order in which one operation, or one per period, is moved by the
    same number of positions."""
    period = len(order) // m
    position = int(draw() * len(order))
    offset = int((2 * draw() - 1) * (MAX_OFFSET + 1))
    num_moves = 1
    if draw() >= SINGLE_MOVE_SHARE:
        num_moves += int(draw() * m)
    new = order.copy()
    for index in range(position, len(order), period)[:num_moves]:
        if 0 <= index + offset < len(new):
            new.insert(index + offset, new.pop(index))
    return new
