"""Time, throughput, model FLOPs utilisation, memory. Units are in the names."""

import itertools
import resource
import time
from typing import Any

import numpy as np
import psutil
import torch

from distributed_training.settings.gpus import find_gpu

MAX_WARMUP_STEPS = 5


class StepTimer:
    """Durations of steps: CUDA events on a GPU (nothing waits for them), a clock on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []
        self._durations_s: list[float] = []

    def restart(self) -> None:
        """Begin counting now; what happened since the last mark counts for no step."""
        self.durations_s()
        self._marks.clear()
        self.mark()

    def mark(self) -> None:
        if not self._cuda:
            self._marks.append(time.perf_counter())
            return
        self._marks.append(torch.cuda.Event(enable_timing=True))
        self._marks[-1].record()

    def durations_s(self) -> list[float]:
        """Seconds of every step so far; waits for the GPU."""
        if self._cuda and self._marks:
            self._marks[-1].synchronize()
        for begin, end in itertools.pairwise(self._marks):
            self._durations_s.append(begin.elapsed_time(end) / 1000 if self._cuda else end - begin)
        self._marks = self._marks[-1:]
        return self._durations_s


def summarise_performance(
    durations_s: list[float],
    *,
    tokens_per_step: float,
    flops_per_token: int,
    world_size: int,
    device_name: str | None,
) -> dict[str, Any]:
    """Percentiles of step time with warm-up (MAX_WARMUP_STEPS, or a third where a run is short)
    left out, and what follows from the median. `tokens_per_step` are real, of the global batch."""
    warmup = min(MAX_WARMUP_STEPS, len(durations_s) // 3)
    timed = np.array(durations_s[warmup:])
    if len(timed) == 0:
        return {"num_timed_steps": 0, "tokens_per_s": None, "mfu": None}
    tokens_per_s = tokens_per_step / float(np.median(timed))
    gpu = find_gpu(device_name)
    peak = gpu.flops if gpu else None  # as of a part of a chip (MIG)
    return {
        "num_warmup_steps": warmup,
        "num_timed_steps": len(timed),
        "step_time_s": {f"p{q}": float(np.percentile(timed, q)) for q in (10, 50, 90, 99)},
        "tokens_per_step": tokens_per_step,
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_process": tokens_per_s / world_size,
        "flops_per_token": flops_per_token,
        "peak_flops_per_gpu": peak,
        "mfu": None if peak is None else tokens_per_s * flops_per_token / (peak * world_size),
    }


class PeakMemory:
    """Highest memory while training; evaluation and export are left out."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._peaks = dict[str, int | None](peak_allocated_bytes=None, peak_reserved_bytes=None)

    def begin(self) -> None:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._device)

    def end(self) -> None:
        if self._cuda:
            counters = torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved
            for name, counter in zip(self._peaks, counters, strict=True):
                self._peaks[name] = max(self._peaks[name] or 0, counter(self._device))

    def as_dict(self) -> dict[str, int | None]:
        """This rank's peaks; null for a device without a counter."""
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {**self._peaks, "peak_host_bytes": host}


def disk_bytes() -> dict[str, int]:
    """Bytes this process has caused to be read from and written to storage, direct I/O (libaio)
    included, page-cache hits not; empty where the system does not count them."""
    try:
        counters = psutil.Process().io_counters()
    except (AttributeError, psutil.Error):
        return {}
    return {"read_bytes": counters.read_bytes, "write_bytes": counters.write_bytes}
