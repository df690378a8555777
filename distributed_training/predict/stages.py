"""In which order the processes of a plan's pipeline work, and when. No torch import.

`zb-auto`'s orders are searched for. Its stages lie in a V, as for `zb-v`, whose order idles least
where all operations take equally long. They do not: the last stage also computes the loss, and a
backward pass is not two forward ones. So the search starts from that order and improves it by
simulated annealing, with random thresholds, on estimated durations. A process may hold the
activations of one micro-batch more than under `zb-v`.

Equal arguments give equal orders on any machine: only additions, products and comparisons of floats
decide, and `random()`, which Python keeps as it is.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

from distributed_training.plan.plan import Plan
from distributed_training.plan.schedules import FoundOrders
from distributed_training.predict.orders import (
    Operation,
    build_orders,
    by_operation,
    find_orders,
    simulate,
)
from distributed_training.predict.rates import Rates, rates_of
from distributed_training.predict.speed import Work
from distributed_training.settings.gpus import known_gpu

Step = tuple[str, int]  # kind and stage; the micro-batches of each follow each other
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
    return simulate(find_orders(plan), seconds, plan.layout.ranks, plan.orders.message_s)


@functools.lru_cache(maxsize=64)
def search_orders(
    seconds: tuple[tuple[float, float, float], ...],
    blocks: tuple[int, ...],
    m: int,
    message_s: float,
) -> tuple[str, ...]:
    """What each process does for `m` micro-batches, as `read_order` reads it.

    Of each stage `seconds` has the duration of F, I and W, and `blocks` what a micro-batch holds
    from F to W; process r has stages r and 2 p - 1 - r. What a stage makes is there `message_s`
    later on another process.
    """
    return _Search(seconds, blocks, m, message_s).find()


class _Search:
    def __init__(
        self, seconds: Sequence[Sequence[float]], blocks: Sequence[int], m: int, message_s: float
    ) -> None:
        self.blocks = blocks
        self.last = len(seconds) - 1
        self.p = len(seconds) // 2
        self.m = m
        self.seconds = by_operation(seconds)
        # The loss goes backward at once, before there are logits of another micro-batch.
        self.at_once = ("I", self.last)
        self.seconds["F", self.last] += self.seconds[self.at_once]
        self.start: list[Words] = [
            [(kind, stage) for kind, stage, _ in order if (kind, stage) != self.at_once]
            for order in build_orders("zb-v", self.p, m)
        ]
        # What an operation's result is for, and how much later it is there: where the V turns it
        # stays in the process.
        self.gives: dict[Step, tuple[Step, float]] = {}
        for stage in range(self.last):
            apart = 0.0 if stage == self.p - 1 else message_s
            self.gives["F", stage] = ("F", stage + 1), apart
            self.gives["I", stage + 1] = ("I", stage), apart
        self.gives["F", self.last] = self.gives.pop(self.at_once)
        self.busy = [sum(self.seconds[step] for step in words) for words in self.start]
        kept = min(self.p + MORE_HELD, m)
        self.room = [
            max(self._holds(words) or 0, kept * (blocks[rank] + blocks[-1 - rank]))
            for rank, words in enumerate(self.start)
        ]

    def find(self) -> tuple[str, ...]:
        """The shortest that was found; that of `zb-v` at worst."""
        draw = random.Random(0).random
        orders = list(self.start)
        best = list(self.start)
        now = shortest = self.length(orders, math.inf) or math.inf
        heat = HEAT * sum(self.seconds.values()) / len(self.seconds)
        count = sum(map(len, orders))
        changes = min(CHANGES * count, SIMULATED // count)
        for change in range(changes):
            rank = int(draw() * self.p)
            old = orders[rank]
            period = len(old) // self.m
            at = int(draw() * len(old))
            by = int((2 * draw() - 1) * (FARTHEST + 1))
            periods = 1 if draw() < ALONE else 1 + int(draw() * self.m)
            new = _moved(old, range(at, len(old), period)[:periods], by)
            if new == old:
                continue
            held = self._holds(new)
            if held is None or held > self.room[rank]:
                continue
            orders[rank] = new
            length = self.length(orders, now + heat * (1 - change / changes) * draw())
            if length is None:
                orders[rank] = old
                continue
            now = length
            if now < shortest:
                shortest = now
                best = list(orders)
        return tuple(map(self._written, best))

    def length(self, orders: Sequence[Words], most: float) -> float | None:
        """Seconds until all is done; None where that is more than `most`, or a deadlock."""
        p = self.p
        seconds = self.seconds
        gives = self.gives
        idle = [most - busy for busy in self.busy]  # seconds that are left to wait
        # When each micro-batch's input, or the gradient of its output, is there.
        ready: dict[Step, list[float]] = {step: [] for step, _ in gives.values()}
        taken = dict.fromkeys(ready, 0)
        clock = [0.0] * p
        at = [0] * p
        waiting = list(range(p))
        while waiting:
            before = sum(at)
            still = []
            for rank in waiting:
                words = orders[rank]
                now = clock[rank]
                place = at[rank]
                while place < len(words):
                    step = words[place]
                    if step in ready:
                        there = ready[step]
                        number = taken[step]
                        if number == len(there):
                            break
                        if there[number] > now:
                            idle[rank] -= there[number] - now
                            if idle[rank] < 0:
                                return None
                            now = there[number]
                        taken[step] = number + 1
                    now += seconds[step]
                    if step in gives:
                        to, message_s = gives[step]
                        ready[to].append(now + message_s)
                    place += 1
                clock[rank] = now
                at[rank] = place
                if place < len(words):
                    still.append(rank)
            if sum(at) == before:
                return None
            waiting = still
        return max(clock)

    def _holds(self, words: Words) -> int | None:
        """Blocks that a process holds activations of at most; None where an operation comes before
        what it needs."""
        ahead = dict.fromkeys(words, 0)  # how often each was done
        held = most = 0
        for step in words:
            kind, stage = step
            ahead[step] += 1
            if kind == "F":
                held += self.blocks[stage]
                most = max(most, held)
                continue
            if kind == "W":
                held -= self.blocks[stage]
            source = "I" if kind == "W" and stage != self.last else "F"
            if ahead[step] > ahead[source, stage]:
                return None
        return most

    def _written(self, words: Words) -> str:
        """As `read_order` reads it, with the last stage's backward passes."""
        ends = {("F", self.last): f"F{self.last} I{self.last}"}
        return " ".join(ends.get(step, f"{step[0]}{step[1]}") for step in words)


def _moved(words: Words, places: Sequence[int], by: int) -> Words:
    """With what is at each of `places`, one after the other, so far further on."""
    new = words.copy()
    for place in places:
        if 0 <= place + by < len(new):
            new.insert(place + by, new.pop(place))
    return new
