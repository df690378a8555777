"""What measurements are made with: a process group that is no training's, and a clock."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from distributed_training.plan.topology import process_group
from distributed_training.run import launch, rendezvous, worker
from distributed_training.run.ranks import Process, current_process, single_process
from distributed_training.settings.config import RENDEZVOUS_S

BUDGET_S = 0.15  # for one figure


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The processes that measure, and this one's device."""

    process: Process
    device: torch.device


@contextlib.contextmanager
def open_group() -> Iterator[Group]:
    """Join the process group that the launcher describes, or make one of this process alone."""
    process = current_process(os.environ) or single_process()
    launch.prepare_environment(process.local_world_size)
    device = worker.prepare(torch.cuda.device_count(), process)
    store = rendezvous.meet(process, RENDEZVOUS_S)
    # Three minutes: another rank may have failed.
    with process_group(device, store, minutes=3):
        yield Group(process=process, device=device)


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds of a call on a device."""

    device: torch.device
    together: bool = False  # all processes take part in every call, and make equally many
    budget_s: float = BUDGET_S  # for one figure

    def wait(self) -> None:
        """Until the device has done everything."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], Any]) -> float:
        """Of one call, the mean of as many as the budget allows."""
        for _ in range(3):
            call()
        once = torch.tensor(self._time(call, 1), dtype=torch.float64)
        if self.together:
            dist.all_reduce(once, op=dist.ReduceOp.MAX)
        return self._time(call, max(3, min(200, int(self.budget_s / float(once)))))

    def _time(self, call: Callable[[], Any], count: int) -> float:
        self.wait()
        start = time.perf_counter()
        for _ in range(count):
            call()
        self.wait()
        return (time.perf_counter() - start) / count
