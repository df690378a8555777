"""In which order the processes of a plan's pipeline work, and when. No torch import.

`zb-auto`'s orders are searched for. Its stages lie in a V, as for `zb-v`, whose order idles least
where all operations take equally long. They do not: the last stage also computes the loss, and a
backward pass is not two forward ones. So the search starts from that order and improves it by
simulated annealing, with random thresholds, on estimated durations. A process may hold the
activations of one micro-batch more than under `zb-v`.

Equal arguments give equal orders on any machine: only additions, products and comparisons of floats
decide, and `random()`, which Python keeps as it is.
"""

import functools
import random
from dataclasses import replace

from distributed_training.plan.plan import Plan
from distributed_training.plan.schedules import SCHEDULES, FoundOrders
from distributed_training.predict.orders import (
    Operation,
    Step,
    build_orders,
    by_operation,
    find_orders,
    flow,
    length_of,
    simulate,
)
from distributed_training.predict.rates import Rates, rates_of
from distributed_training.predict.speed import Work
from distributed_training.settings.gpus import known_gpu

Words = list[Step]
# By trial on durations of gpt2-medium over 4 H200s (3f6f234), p 2 to 8 and m 1 to 32.
MORE_HELD = 1  # micro-batches, than zb-v's p
CHANGES = 150  # tried for each operation
SIMULATED = 5_000_000  # operations in all at most: a second or two
FARTHEST = 6  # places by which one is moved
ALONE = 0.3  # share of changes that move one, rather than as many in the next periods
HEAT = 0.16  # of a mean operation, by which the first changes may make a step longer


def with_orders(plan: Plan, rates: Rates | None) -> Plan:
    """The plan with what a search finds for the durations that `rates` mean, if its schedule is
    searched for; without rates by those of an H200.

    Durations go with the orders: processes that put messages in different orders would deadlock.
    """
    if not plan.schedule.searched:
        return plan
    work = Work(plan, rates or rates_of(known_gpu("H200")))
    costs = {key: float(cost.sum()) for key, cost in work.operations().items()}
    blocks = plan.layout.blocks_per_stage
    stages = range(len(blocks))
    seconds = tuple((costs["F", s], costs["I", s], costs["W", s]) for s in stages)
    message_s = work.message()
    orders = search_orders(seconds, blocks, plan.batch.num_microbatches, message_s)
    found = FoundOrders(by_place=orders, stage_s=seconds, message_s=message_s)
    return replace(plan, orders=found)


def expect_spans(plan: Plan) -> dict[Operation, tuple[float, float]]:
    """Begin and end of each operation of a step in seconds, by what the search went by."""
    assert plan.orders is not None
    seconds = by_operation(plan.orders.stage_s)
    gives = flow(plan.layout.ranks, plan.orders.message_s)
    spans = simulate(find_orders(plan), seconds, gives)
    return {(*step, number): span for step in spans for number, span in enumerate(spans[step])}


@functools.lru_cache(maxsize=64)
def search_orders(
    seconds: tuple[tuple[float, float, float], ...],
    blocks: tuple[int, ...],
    m: int,
    message_s: float,
) -> tuple[str, ...]:
    """What each process does for `m` micro-batches, as `read_order` reads it: the shortest that was
    found, that of `zb-v` at worst.

    Of each stage `seconds` has the duration of F, I and W, and `blocks` what a micro-batch holds
    from F to W; process r has stages r and 2 p - 1 - r. What a stage makes is there `message_s`
    later on another process.
    """
    last = len(blocks) - 1
    p = len(blocks) // 2
    took = by_operation(seconds)
    # The loss goes backward at once, before there are logits of another micro-batch.
    at_once = ("I", last)
    took["F", last] += took[at_once]
    best: list[Words] = [
        [(kind, stage) for kind, stage, _ in order if (kind, stage) != at_once]
        for order in build_orders("zb-v", p, m)
    ]
    gives = flow(SCHEDULES["zb-v"].ranks(p), message_s)
    gives["F", last] = gives.pop(at_once)

    def held_by(words: Words) -> int | None:
        """Blocks that a process holds activations of at most; None where an operation comes before
        what it needs."""
        ahead = dict.fromkeys(words, 0)  # how often each was done
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

    kept = min(p + MORE_HELD, m)
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
        for place in range(at, len(old), period)[:periods]:
            if 0 <= place + by < len(new):
                new.insert(place + by, new.pop(place))
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
    ends = {("F", last): f"F{last} I{last}"}
    return tuple(
        " ".join(ends.get(step, f"{step[0]}{step[1]}") for step in words) for words in best
    )
