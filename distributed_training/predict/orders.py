"""In which order each process of a pipeline works, and how long that takes. No torch import.

Orders are those of torch.distributed.pipelining (schedules.py of 2.11 to 2.13), but for `zb-v`,
which is its authors' (zb_v.py), and `zb-auto`, which is searched for. An operation is (kind, stage,
micro-batch): "F" forward, "B" backward, "I" backward for inputs only, "W" backward for weights
only."""

import functools
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from distributed_training.plan.plan import Plan
from distributed_training.plan.schedules import SCHEDULES, FoundOrders
from distributed_training.predict.zb_v import build_words, mid_durations

Step = tuple[str, int]  # kind and stage; the micro-batches of each follow each other
Operation = tuple[str, int, int]
Order = tuple[Operation, ...]  # of one process

# Of the search for `zb-auto`, by trial on durations of gpt2-medium over 4 H200s (3f6f234), p 2 to 8
# and m 1 to 32.
CHANGES = 150  # tried for each operation
SIMULATED = 5_000_000  # operations in all at most: a second or two
FARTHEST = 6  # places by which one is moved
ALONE = 0.3  # share of changes that move one, rather than as many in the next periods
HEAT = 0.16  # of a mean operation, by which the first changes may make a step longer


def find_orders(plan: Plan) -> tuple[Order, ...]:
    """What each process along pp does: as the schedule says, or as was found for the durations."""
    if plan.orders is not None:
        return tuple(map(read_order, plan.orders.by_place))
    assert not plan.schedule.searched, "lay_out_on searches"
    schedule = plan.config.pipeline_schedule
    return build_orders(schedule, plan.mesh["pp"], plan.batch.num_microbatches)


@functools.cache
def build_orders(schedule: str, p: int, m: int) -> tuple[Order, ...]:
    """What each of `p` processes does for `m` micro-batches."""
    if p == 1:  # one after the other
        schedule = "1f1b"
    if schedule == "zb-v":
        return tuple(_in_a_v(word, p, rank) for rank, word in enumerate(build_words(p, m)))
    return tuple(_one_f_one_b(schedule, p, m, rank) for rank in range(p))


def read_order(text: str) -> Order:
    """Such as "F0 F0 I7 W7": kinds and stages."""
    return _numbered((word[0], int(word[1:])) for word in text.split())


def _numbered(steps: Iterable[Step]) -> Order:
    """With micro-batches: those of each kind and stage follow each other."""
    numbers: dict[Step, Iterator[int]] = defaultdict(itertools.count)
    return tuple((kind, stage, next(numbers[kind, stage])) for kind, stage in steps)


def by_operation(stage_s: Sequence[Sequence[float]]) -> dict[Step, float]:
    """(kind, stage) -> seconds, of the durations of each stage's F, I and W."""
    return {
        (kind, stage): took
        for stage, each in enumerate(stage_s)
        for kind, took in zip("FIW", each, strict=True)
    }


def _one_f_one_b(schedule: str, p: int, m: int, rank: int) -> Order:
    """1F1B, interleaved 1F1B and ZB-H1: forwards to begin with, then one of each, then the rest;
    GPipe: all forwards to begin with."""
    local = 2 if schedule == "interleaved" else 1
    a_round = m // max(1, m // p)
    count = m * local
    ahead = min((local - 1) * a_round + local * (p - 1 - rank), count)
    if schedule == "gpipe":
        ahead = count
    splits = schedule == "zb-h1"
    order: list[Step] = []  # kinds and local stages
    for step in range(count + ahead):
        if step < count:
            order.append(("F", step // a_round % local))
        if step >= ahead:
            order.append(("I" if splits else "B", local - 1 - (step - ahead) // a_round % local))
            if splits and step - ahead >= rank:
                order.append(("W", 0))
    if splits:
        order += [("W", 0)] * min(rank, m)
    return _numbered((kind, at * p + rank) for kind, at in order)


def _in_a_v(word: str, p: int, rank: int) -> Order:
    """The order of a word, whose small letters are operations of the process's second stage."""
    second = 2 * p - 1 - rank
    return _numbered((x.upper(), rank if x.isupper() else second) for x in word)


def fixed_zb_v(p: int, m: int) -> tuple[Order, ...]:
    """torch's ZB-V: one order for all durations. Runs of `zb-v` before 25 November 2026 ran it, and
    `zb-auto` may start from it. What torch would do for more micro-batches is left out."""
    number = max(2 * p - 1, m)
    orders = []
    for rank in range(p):
        word = "F" * (2 * (p - rank) - 1) + "fF" * rank + "fiw" * (p - rank)
        word += "FIWfiw" * (number - (2 * p - 1 - rank)) + "IWfiw" * (p - 1 - rank)
        word += "Ii" * rank + "IW" * (p - rank) + "w" * rank + "W" * rank
        orders.append(tuple(step for step in _in_a_v(word, p, rank) if step[2] < m))
    return tuple(orders)


def time_orders(
    seconds: tuple[tuple[float, float, float], ...], m: int, message_s: float
) -> FoundOrders:
    """What each process does for `m` micro-batches under `zb-v`, for F, I and W of each stage."""
    p = len(seconds) // 2
    words = build_words(p, m, *mid_durations(seconds), message_s)
    orders = [_in_a_v(word, p, rank) for rank, word in enumerate(words)]
    return FoundOrders(by_place=write_orders(orders), stage_s=seconds, message_s=message_s)


def write_orders(orders: Iterable[Iterable[Step | Operation]]) -> tuple[str, ...]:
    """Such as "F0 F0 I7 W7", as `read_order` reads it."""
    return tuple(" ".join(f"{step[0]}{step[1]}" for step in order) for order in orders)


def flow(ranks: Sequence[int], message_s: float) -> dict[Step, tuple[Step, float]]:
    """What an operation's result is for on the next stage, and how many seconds later it is there:
    at once where that is in the same process. `ranks`: the process of each stage."""
    gives: dict[Step, tuple[Step, float]] = {}
    for stage, (rank, following) in enumerate(itertools.pairwise(ranks)):
        apart = 0.0 if rank == following else message_s
        gives["F", stage] = ("F", stage + 1), apart
        for kind in "BI":
            gives[kind, stage + 1] = (kind, stage), apart
    return gives


def simulate(
    orders: Sequence[Sequence[Step | Operation]],
    seconds: Mapping[Step, float],
    gives: Mapping[Step, tuple[Step, float]],
    launching: Mapping[Step, float] | None = None,
) -> dict[Step, list[tuple[float, float]]]:
    """Begin and end of each operation, by micro-batch, where one of a stage takes `seconds` and its
    result is for what `flow` says; nothing where processes wait for each other forever.

    `launching`: seconds for which the host of a process launches an operation, one after the other
    and ahead of the GPU, which cannot end before."""
    # When each micro-batch's input, or the gradient of its output, is there.
    ready: dict[Step, list[float]] = {step: [] for step, _ in gives.values()}
    spans: dict[Step, list[tuple[float, float]]] = defaultdict(list)
    hosts = [0.0] * len(orders)
    clock = [0.0] * len(orders)
    left = [list(reversed(order)) for order in orders]
    while any(left):
        before = sum(map(len, left))
        for rank, steps in enumerate(left):
            end = clock[rank]
            while steps:
                step = steps[-1][:2]
                done = spans[step]
                begin = end
                if step in ready:
                    there = ready[step]
                    if len(there) == len(done):
                        break
                    if there[len(done)] > begin:
                        begin = there[len(done)]
                end = begin + seconds[step]
                if launching:
                    hosts[rank] += launching[step]
                    end = max(end, hosts[rank])
                done.append((begin, end))
                if step in gives:
                    to, message_s = gives[step]
                    ready[to].append(end + message_s)
                steps.pop()
            clock[rank] = end
        if sum(map(len, left)) == before:
            return {}
    return spans


def length_of(spans: Mapping[Step, Sequence[tuple[float, float]]]) -> float:
    """Seconds until the last operation ends."""
    return max((each[-1][1] for each in spans.values()), default=math.inf)


def expect_spans(plan: Plan) -> dict[Operation, tuple[float, float]]:
    """Begin and end of each operation of a step in seconds, by what the search went by."""
    assert plan.orders is not None
    seconds = by_operation(plan.orders.stage_s)
    spans = simulate(find_orders(plan), seconds, flow(plan.layout.ranks, plan.orders.message_s))
    return {(*step, number): span for step in spans for number, span in enumerate(spans[step])}


@functools.lru_cache(maxsize=64)
def search_orders(
    seconds: tuple[tuple[float, float, float], ...],
    blocks: tuple[int, ...],
    m: int,
    message_s: float,
) -> FoundOrders:
    """What each process does for `m` micro-batches under `zb-auto`: the shortest that was found,
    that of `zb-v` at worst.

    Of each stage `seconds` has the duration of F, I and W, and `blocks` what a micro-batch holds
    from F to W; process r has stages r and 2 p - 1 - r. What a stage makes is there `message_s`
    later on another process.

    `zb-v` takes stages to be equal. They are not: the last stage also computes the loss. So its
    order, or torch's if that is shorter, is improved by simulated annealing, with random
    thresholds, on estimated durations. Equal arguments give equal
    orders on any machine: only additions, products and comparisons of floats decide, and
    `random()`, which Python keeps as it is."""
    last = len(blocks) - 1
    p = len(blocks) // 2
    took = by_operation(seconds)
    # The loss goes backward at once, before there are logits of another micro-batch.
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
    by_place = tuple(text.replace(f"F{last}", f"F{last} I{last}") for text in write_orders(best))
    return FoundOrders(by_place=by_place, stage_s=seconds, message_s=message_s)
