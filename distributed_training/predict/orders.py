"""In which order each process of a pipeline works, and how long that takes. No torch import.

Orders are those of torch.distributed.pipelining (schedules.py of 2.11 to 2.13). An operation is
(kind, stage, micro-batch): "F" forward, "B" backward, "I" backward for inputs only, "W" backward
for weights only.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

Operation = tuple[str, int, int]
Order = tuple[Operation, ...]  # of one process


@functools.cache
def build_orders(schedule: str, p: int, m: int) -> tuple[Order, ...]:
    """What each of `p` processes does for `m` micro-batches."""
    if p == 1:
        return (tuple(step for i in range(m) for step in (("F", 0, i), ("B", 0, i))),)
    one = {"gpipe": _gpipe, "zb-v": _zb_v}.get(schedule)
    if one is not None:
        return tuple(tuple(one(p, m, rank)) for rank in range(p))
    assert schedule in ("1f1b", "interleaved", "zb-h1"), schedule
    return tuple(tuple(_one_f_one_b(schedule, p, m, rank)) for rank in range(p))


def read_order(text: str) -> Order:
    """Such as "F0 F0 I7 W7": kinds and stages; the micro-batches of each follow each other."""
    done: dict[str, int] = {}
    order: list[Operation] = []
    for word in text.split():
        number = done[word] = done.get(word, -1) + 1
        order.append((word[0], int(word[1:]), number))
    return tuple(order)


def by_operation(stage_s: Sequence[Sequence[float]]) -> dict[tuple[str, int], float]:
    """(kind, stage) -> seconds, of the durations of each stage's F, I and W."""
    return {
        (kind, stage): took
        for stage, each in enumerate(stage_s)
        for kind, took in zip("FIW", each, strict=True)
    }


def _gpipe(p: int, m: int, rank: int) -> list[Operation]:
    return [("F", rank, i) for i in range(m)] + [("B", rank, i) for i in range(m)]


def _one_f_one_b(schedule: str, p: int, m: int, rank: int) -> list[Operation]:
    """1F1B, interleaved 1F1B and ZB-H1: forwards to begin with, then one of each, then the rest."""
    local = 2 if schedule == "interleaved" else 1
    a_round = m // max(1, m // p)
    ahead = min((local - 1) * a_round + local * (p - 1 - rank), m * local)
    count = m * local
    split = schedule == "zb-h1"
    done = {kind: [0] * local for kind in "FBW"}
    order: list[Operation] = []
    weights: list[int] = []  # local stages whose W is still to come

    def add(kind: str, at: int) -> None:
        number = done["B" if kind == "I" else kind]
        order.append((kind, at * p + rank, number[at]))
        number[at] += 1

    for step in range(count + ahead):
        if step < count:
            add("F", step // a_round % local)
        if step >= ahead:
            at = local - 1 - (step - ahead) // a_round % local
            add("I" if split else "B", at)
            weights += [at] * split
            if split and step - ahead >= rank:
                add("W", weights.pop(0))
    for at in weights:
        add("W", at)
    return order


def _zb_v(p: int, m: int, rank: int) -> list[Operation]:
    """Zero bubble over a V; what torch would do for more micro-batches is left out."""
    number = max(2 * p - 1, m)
    done = {(kind, half): 0 for kind in "FIW" for half in (0, 1)}
    order: list[Operation] = []

    def add(words: str) -> None:
        """Such as "F0 I1 W1": kind and half of the V."""
        for word in words.split():
            kind = word[0]
            half = word[1]
            place = (kind, int(half))
            order.append((kind, rank if half == "0" else 2 * p - 1 - rank, done[place]))
            done[place] += 1

    add("F0 " * (2 * (p - rank) - 1) + "F1 F0 " * rank + "F1 I1 W1 " * (p - rank))
    while done["F", 1] < done["F", 0] or done["F", 0] < number:
        add("F0 " * (done["F", 0] < number) + "I0 W0 F1 I1 W1")
    add("I0 I1 " * rank + "I0 W0 " * (p - rank))
    add("W1 " * (done["I", 1] - done["W", 1]) + "W0 " * (done["I", 0] - done["W", 0]))
    return [operation for operation in order if operation[2] < m]


def simulate(
    orders: Sequence[Order],
    seconds: Mapping[tuple[str, int], float],
    ranks: Sequence[int],
    message_s: float,
    launching: Mapping[tuple[str, int], float] | None = None,
) -> dict[Operation, tuple[float, float]]:
    """Begin and end of each operation, where one of a stage takes `seconds[kind, stage]` and what
    it makes is there `message_s` later on another process. `ranks`: the process of each stage.

    `launching`: seconds for which the host of a process launches an operation, one after the other
    and ahead of the GPU, which cannot end before.
    """
    hosts = [0.0] * len(orders)
    spans: dict[Operation, tuple[float, float]] = {}
    clock = [0.0] * len(orders)
    left = [list(reversed(order)) for order in orders]
    while any(left):
        before = len(spans)
        for rank, steps in enumerate(left):
            while steps:
                operation = steps[-1]
                begin = clock[rank]
                source = _source(operation, len(ranks) - 1)
                if source is not None:
                    if source not in spans:
                        break
                    there = spans[source][1]
                    if ranks[source[1]] != rank:
                        there += message_s
                    begin = max(begin, there)
                if launching:
                    hosts[rank] += launching[operation[:2]]
                clock[rank] = max(begin + seconds[operation[:2]], hosts[rank])
                spans[steps.pop()] = begin, clock[rank]
        assert len(spans) > before, "an order that waits for itself"
    return spans


def length_of(spans: Mapping[Operation, tuple[float, float]]) -> float:
    """Seconds until the last operation ends."""
    return max(end for _, end in spans.values())


def _source(operation: Operation, last: int) -> Operation | None:
    """Which one, of another stage or the loss, makes what this one works on."""
    kind, stage, number = operation
    if kind == "F":
        return ("F", stage - 1, number) if stage else None
    if kind == "W":
        return None
    return (kind, stage + 1, number) if stage < last else ("F", stage, number)
