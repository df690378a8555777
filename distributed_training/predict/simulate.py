"""Simulate how long a pipeline takes to run its operations in a given order on each rank. This
module does not import torch."""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from distributed_training.plan.orders import Operation, Step, find_orders
from distributed_training.plan.plan import Draft


def by_operation(stage_s: Sequence[Sequence[float]]) -> dict[Step, float]:
    """Return the duration in seconds of each (kind, stage). `stage_s`: durations of F, I and W for
    each stage."""
    return {
        (kind, stage): took
        for stage, durations in enumerate(stage_s)
        for kind, took in zip("FIW", durations, strict=True)
    }


def flow(ranks: Sequence[int], message_s: float) -> dict[Step, tuple[Step, float]]:
    """Map each operation to (the operation that needs its result, the time in seconds to send the
    result). The time is 0 if both operations run on the same rank. `ranks`: the rank of each
    stage."""
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
    """Return the (start, end) times of each operation in seconds, one pair per micro-batch. If the
    orders deadlock, the returned mapping is empty. `gives`: the result of `flow`.

    `launching`: time in seconds that a rank's host needs to launch each operation. The host
    launches operations ahead of the GPU, and no operation ends on the GPU before its launch has
    ended."""
    # Times at which each micro-batch's input, or the gradient of its output, arrives
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
    """Return the time in seconds at which the last operation ends."""
    return max((times[-1][1] for times in spans.values()), default=math.inf)


def expect_spans(plan: Draft) -> dict[Operation, tuple[float, float]]:
    """Return the expected (start, end) times of each operation in seconds, given the durations that
    the schedule search used."""
    assert plan.orders is not None
    seconds = by_operation(plan.orders.stage_s)
    spans = simulate(find_orders(plan), seconds, flow(plan.layout.ranks, plan.orders.message_s))
    return {(*step, number): span for step in spans for number, span in enumerate(spans[step])}
