"""Simulate how long a pipeline takes to run its operations in a given order on each rank. This
module does not import torch."""

import itertools
from collections.abc import Mapping, Sequence

from distributed_training.plan.orders import Order, Step, build_orders
from distributed_training.plan.schedules import find_schedule

Spans = dict[Step, list[tuple[float, float]]]  # start and end of each micro-batch


def map_consumers(ranks: Sequence[int], message_s: float) -> dict[Step, tuple[Step, float]]:
    """Map each operation to (the operation that needs its result, the time in seconds to send the
    result). The time is 0 if both operations run on the same rank. `ranks` contains the rank of
    each stage."""
    consumers = {}
    for stage, (rank, next_rank) in enumerate(itertools.pairwise(ranks)):
        transfer_s = 0.0 if rank == next_rank else message_s
        consumers["F", stage] = ("F", stage + 1), transfer_s
        for kind in "BI":
            consumers[kind, stage + 1] = (kind, stage), transfer_s
    return consumers


def simulate(
    orders: Sequence[Order],
    durations: Mapping[Step, float],
    consumers: Mapping[Step, tuple[Step, float]],
    launch_s: Mapping[Step, float] | None = None,
) -> Spans:
    """Return the (start, end) times of each operation in seconds, one pair per micro-batch.
    `consumers` is the result of `map_consumers`.

    `launch_s` contains the time in seconds that a rank's host needs to launch each operation. The
    host launches operations ahead of the GPU, and no operation ends on the GPU before its launch
    has ended."""
    spans: Spans = {step: [] for step in durations}
    # Times at which each micro-batch's input, or the gradient of its output, arrives
    arrival_times: dict[Step, list[float]] = {step: [] for step, _ in consumers.values()}
    lists_by_step = {}
    for step, finished in spans.items():
        consumer, message_s = consumers.get(step, (None, 0.0))
        sent = None if consumer is None else arrival_times[consumer]
        lists_by_step[step] = finished, arrival_times.get(step), sent, message_s
    host_clocks = [0.0] * len(orders)
    gpu_clocks = [0.0] * len(orders)
    remaining = [iter(order) for order in orders]
    waiting = [next(steps, None) for steps in remaining]  # first operation of each rank
    while any(waiting):
        is_stuck = True
        for rank, steps in enumerate(remaining):
            operation = waiting[rank]
            end = gpu_clocks[rank]
            while operation:
                step = operation[:2]
                finished, arrivals, sent, message_s = lists_by_step[step]
                begin = end
                if arrivals is not None:
                    number = len(finished)
                    if len(arrivals) == number:
                        break
                    if arrivals[number] > begin:
                        begin = arrivals[number]
                end = begin + durations[step]
                if launch_s:
                    host_clocks[rank] += launch_s[step]
                    end = max(end, host_clocks[rank])
                finished.append((begin, end))
                if sent is not None:
                    sent.append(end + message_s)
                operation = next(steps, None)
                is_stuck = False
            gpu_clocks[rank] = end
            waiting[rank] = operation
        assert not is_stuck, "the orders deadlock"
    return {step: finished for step, finished in spans.items() if finished}


def total_duration(spans: Mapping[Step, Sequence[tuple[float, float]]]) -> float:
    """Return the time in seconds at which the last operation ends."""
    return max(times[-1][1] for times in spans.values())


def ideal_bubble(schedule: str, p: int, m: int) -> float:
    """Return the fraction of a step's time that ranks wait if messages take no time, all stages
    take equally long, and a backward pass takes twice as long as a forward pass."""
    ranks = find_schedule(schedule, {"pp": p}).ranks(p)
    units = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    durations = {(kind, stage): unit for kind, unit in units.items() for stage in range(len(ranks))}
    consumers = map_consumers(ranks, 0.0)
    duration = total_duration(simulate(build_orders(schedule, p, m), durations, consumers))
    return 1 - 3 * m * len(ranks) / (p * duration)
