"""Search for the order of operations for the pipeline schedule `zb-auto`.

This module does not import torch."""

import functools
import random

from distributed_training.plan.orders import (
    Order,
    Step,
    order_in_v,
    read_order,
    time_orders,
    write_orders,
)
from distributed_training.plan.schedules import SCHEDULES, FoundOrders
from distributed_training.predict.simulate import (
    durations_by_step,
    map_consumers,
    simulate,
    total_duration,
)

# Parameters of the search, tuned with durations of gpt2-medium on 4 H200 GPUs (commit 3f6f234) for
# 2 to 8 ranks and 1 to 32 micro-batches.
CHANGES = 150  # changes tested per operation
SIMULATED = 5_000_000  # maximum number of simulated operations; a search takes 1 to 2 s
FARTHEST = 6  # maximum number of positions by which an operation is moved
ALONE = 0.3  # fraction of changes that move one operation rather than one per period
HEAT = 0.16  # initial limit on the slowdown from a change, in mean operation durations


def fixed_zb_v(p: int, m: int) -> tuple[Order, ...]:
    """Return torch's ZB-V order, which does not depend on durations. Runs of `zb-v` before November
    25, 2026 used this order, and the search for `zb-auto` may start from it. If `m` is less than 2
    p - 1, torch adds micro-batches. The operations of these micro-batches are omitted here."""
    number = max(2 * p - 1, m)
    orders = []
    for rank in range(p):
        word = "F" * (2 * (p - rank) - 1) + "fF" * rank + "fiw" * (p - rank)
        word += "FIWfiw" * (number - (2 * p - 1 - rank)) + "IWfiw" * (p - 1 - rank)
        word += "Ii" * rank + "IW" * (p - rank) + "w" * rank + "W" * rank
        orders.append(tuple(step for step in order_in_v(word, p, rank) if step[2] < m))
    return tuple(orders)


@functools.lru_cache(maxsize=64)
def search_orders(
    seconds: tuple[tuple[float, float, float], ...],
    blocks: tuple[int, ...],
    m: int,
    message_s: float,
) -> FoundOrders:
    """Return the fastest order found for `m` micro-batches under `zb-auto`. This order is never
    slower than the order of `zb-v` in the simulation.

    `seconds` contains the time in seconds of F, I and W for each stage. `blocks` contains the
    number of blocks in each stage. A micro-batch holds the activations of these blocks from F to W.
    Rank r of p has the stages r and 2 p - 1 - r. `message_s` is the time in seconds to send a
    result to another rank.

    The order of `zb-v` assumes equal stages, but the last stage also computes the loss. The search
    starts from the order of `zb-v`, or from torch's ZB-V order if that order is faster.
    Simulated annealing with random thresholds then improves the order for the estimated durations.
    Equal arguments give equal orders on any machine, because the search uses only basic operations
    on floats and `random()`. The sequence of `random()` does not depend on the Python version."""
    last = len(blocks) - 1
    p = len(blocks) // 2
    took = durations_by_step(seconds)
    # The last stage runs I right after F, before the logits of another micro-batch exist.
    at_once = ("I", last)
    took["F", last] += took[at_once]
    gives = map_consumers(SCHEDULES["zb-v"].ranks(p), message_s)
    gives["F", last] = gives.pop(at_once)
    timed = tuple(map(read_order, time_orders(seconds, m, message_s).by_place))
    best: list[list[Step]] = min(
        (
            [[step[:2] for step in order if step[:2] != at_once] for order in starts]
            for starts in (fixed_zb_v(p, m), timed)
        ),
        key=lambda words: total_duration(simulate(words, took, gives)),
    )

    def held_by(words: list[Step]) -> int | None:
        """Return the largest number of blocks whose activations a rank holds at once. Return None
        if an operation comes before its input."""
        ahead = dict.fromkeys(words, 0)  # number of times that each step has run
        held = most = 0
        for step in words:
            kind, stage = step
            ahead[step] += 1
            if kind == "F":
                held += blocks[stage]
                most = max(most, held)
                continue
            if kind == "W":
                held -= blocks[stage]
            source = "I" if kind == "W" and stage != last else "F"
            if ahead[step] > ahead[source, stage]:
                return None
        return most

    kept = SCHEDULES["zb-auto"].kept(p, m)
    room = [
        max(held_by(words) or 0, kept * (blocks[rank] + blocks[-1 - rank]))
        for rank, words in enumerate(best)
    ]
    draw = random.Random(0).random
    orders = list(best)
    now = shortest = total_duration(simulate(orders, took, gives))
    heat = HEAT * sum(took.values()) / len(took)
    count = sum(map(len, orders))
    changes = min(CHANGES * count, SIMULATED // count)
    for change in range(changes):
        rank = int(draw() * p)
        old = orders[rank]
        period = len(old) // m
        at = int(draw() * len(old))
        by = int((2 * draw() - 1) * (FARTHEST + 1))
        periods = 1 if draw() < ALONE else 1 + int(draw() * m)
        new = old.copy()
        for index in range(at, len(old), period)[:periods]:
            if 0 <= index + by < len(new):
                new.insert(index + by, new.pop(index))
        held = None if new == old else held_by(new)
        if held is None or held > room[rank]:
            continue
        orders[rank] = new
        most = now + heat * (1 - change / changes) * draw()
        length = total_duration(simulate(orders, took, gives))
        if length > most:
            orders[rank] = old
            continue
        now = length
        if now < shortest:
            shortest = now
            best = list(orders)
    by_place = tuple(text.replace(f"F{last}", f"F{last} I{last}") for text in write_orders(best))
    return FoundOrders(by_place=by_place, stage_s=seconds, message_s=message_s)
