"""Seconds of calls on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

BUDGET_S = 0.15  # for one figure
CALLS = 30  # of a part of a training
LAUNCHES = 50  # of which the host's time is the mean


class Clock:
    """Seconds of a call on a device, and of launching it."""

    def __init__(
        self, device: torch.device, *, crowded: bool = False, budget_s: float | None = None
    ) -> None:
        """`crowded`: all processes make every call together, as they share the cores. `budget_s`:
        for one figure, instead of BUDGET_S."""
        self.device = device
        self.crowded = crowded
        self.budget_s = BUDGET_S if budget_s is None else budget_s

    def wait(self) -> None:
        """Until the device has done everything."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], Any], *, together: bool = False) -> float:
        """Of one call, the mean of as many as BUDGET_S allows. `together`: the same number on all
        ranks, which take part in it."""
        for _ in range(3):
            call()
        self.wait()
        start = time.perf_counter()
        call()
        self.wait()
        once = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        if together or self.crowded:
            dist.all_reduce(once, op=dist.ReduceOp.MAX)
        count = max(3, min(200, int(self.budget_s / float(once))))
        start = time.perf_counter()
        for _ in range(count):
            call()
        self.wait()
        return (time.perf_counter() - start) / count

    def in_step(self, call: Callable[[], Any]) -> float:
        """Median of CALLS that all processes begin and end together, as the steps of a training."""
        found = []
        for _ in range(CALLS):
            start = time.perf_counter()
            call()
            if self.crowded:
                dist.barrier()
            found.append(time.perf_counter() - start)
        return statistics.median(found)

    def launching(self, call: Callable[[], Any]) -> float:
        """Seconds for which the host is busy with one call."""
        for _ in range(5):
            call()
        self.wait()
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            call()
        seconds = (time.perf_counter() - start) / LAUNCHES
        self.wait()
        return seconds
