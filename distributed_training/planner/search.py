"""Search for `zb-auto`'s order of operations. No torch."""

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
from distributed_training.predict.simulate import by_operation, flow, length_of, simulate

# Parameters of the search for `zb-auto`, fitted on durations of gpt2-medium over 4 H200s (3f6f234),
# p 2 to 8 and m 1 to 32.
CHANGES = 150  # changes tried per operation
SIMULATED = 5_000_000  # most operations simulated in total, which takes 1 to 2 s
FARTHEST = 6  # most positions by which an operation is moved
ALONE = 0.3  # share of changes that move one operation, not one in each of several periods
HEAT = 0.16  # mean operations by which the first changes may make a step longer


def fixed_zb_v(p: int, m: int) -> tuple[Order, ...]:
    """Return torch's ZB-V order, which does not depend on durations. Runs of `zb-v` before 25
    November 2026 used this order, and `zb-auto` may start from it. Operations of micro-batches
    beyond `m`, which torch would add, are left out."""
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
    """Return the shortest order found for `m` micro-batches under `zb-auto`. `zb-v`'s order is the
    longest that it returns.

    `seconds` has the durations of F, I and W of each stage. `blocks` has the number of blocks in
    each stage, whose activations a micro-batch holds from F to W. Rank r has stages r and 2 p - 1 -
    r. A result reaches another rank after `message_s`.

    `zb-v` assumes equal stages, but the last stage also computes the loss. Therefore simulated
    annealing with random thresholds improves its order, or torch's if that is shorter, on estimated
    durations. Equal arguments give equal orders on any machine, because the search uses only
    additions, products and comparisons of floats, and `random()`, which Python does not change."""
    last = len(blocks) - 1
    p = len(blocks) // 2
    took = by_operation(seconds)
    # The loss runs its backward pass at once, before the logits of another micro-batch exist.
    at_once = ("I", last)
    took["F", last] += took[at_once]
    gives = flow(SCHEDULES["zb-v"].ranks(p), message_s)
    gives["F", last] = gives.pop(at_once)
    timed = tuple(map(read_order, time_orders(seconds, m, message_s).by_place))
    best: list[list[Step]] = min(
        (
            [[step[:2] for step in order if step[:2] != at_once] for order in starts]
            for starts in (fixed_zb_v(p, m), timed)
        ),
        key=lambda words: length_of(simulate(words, took, gives)),
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
    now = shortest = length_of(simulate(orders, took, gives))
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
        length = length_of(simulate(orders, took, gives))
        if length > most:
            orders[rank] = old
            continue
        now = length
        if now < shortest:
            shortest = now
            best = list(orders)
    by_place = tuple(text.replace(f"F{last}", f"F{last} I{last}") for text in write_orders(best))
    return FoundOrders(by_place=by_place, stage_s=seconds, message_s=message_s)
