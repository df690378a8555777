"""Time, throughput, model FLOPs utilisation and memory. Units are in the names."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

# Dense bf16 (fp16 where the chip has no bf16) tensor-core FLOP/s from the vendors' datasheets.
# The first name whose words occur in the device's name counts.
PEAK_FLOPS: dict[str, float] = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989.5e12,
    "H200": 989.5e12,
    "GH200": 989.5e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A40": 149.7e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
    "V100": 125e12,
    "T4": 65e12,
}
MAX_WARMUP_STEPS = 5


def peak_flops(device_name: str | None) -> float | None:
    """Peak of one device, FLOP/s; None where it is not known, so that MFU is null, not guessed.

    Names are compared by whole words: an L40 is not an L4. Parts of a chip (MIG) and laptops'
    chips are not known.
    """
    words = (device_name or "").replace("-", " ").split()
    if "MIG" in words or "Laptop" in words:
        return None
    text = f" {' '.join(words)} "
    return next((flops for name, flops in PEAK_FLOPS.items() if f" {name} " in text), None)


class StepTimer:
    """Durations of steps: CUDA events on a GPU (nothing waits for them), a clock on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []
        self._durations_s: list[float] = []

    def restart(self) -> None:
        """Begin counting now; what happened since the last mark counts for no step."""
        self._collect()
        self._marks = [self._now()]

    def mark(self) -> None:
        """A step has ended."""
        self._marks.append(self._now())

    def durations_s(self) -> list[float]:
        """Seconds of every step so far; waits for the GPU."""
        self._collect()
        return self._durations_s

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _collect(self) -> None:
        if len(self._marks) < 2:
            return
        if self._cuda:
            self._marks[-1].synchronize()
        for begin, end in zip(self._marks, self._marks[1:], strict=False):
            span = begin.elapsed_time(end) / 1000 if self._cuda else end - begin
            self._durations_s.append(span)
        self._marks = self._marks[-1:]


def summarise_performance(
    durations_s: list[float],
    *,
    tokens_per_step: float,
    flops_per_token: int,
    world_size: int,
    device_name: str | None,
) -> dict[str, Any]:
    """Percentiles of step time with warm-up left out, and what follows from the median.

    The first steps (compilation, allocator, caches) are left out: MAX_WARMUP_STEPS of them, or
    a third where a run is that short. `tokens_per_step` are real targets of the global batch.
    """
    warmup = min(MAX_WARMUP_STEPS, len(durations_s) // 3)
    timed = np.array(durations_s[warmup:])
    if len(timed) == 0:
        return {"num_timed_steps": 0, "tokens_per_s": None, "mfu": None}
    median = float(np.median(timed))
    tokens_per_s = tokens_per_step / median
    peak = peak_flops(device_name)
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
        self.allocated_bytes = 0
        self.reserved_bytes = 0

    def begin(self) -> None:
        """Training (re)starts."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def end(self) -> None:
        """Training pauses."""
        if self._device.type == "cuda":
            allocated = torch.cuda.max_memory_allocated(self._device)
            reserved = torch.cuda.max_memory_reserved(self._device)
            self.allocated_bytes = max(self.allocated_bytes, allocated)
            self.reserved_bytes = max(self.reserved_bytes, reserved)

    def as_dict(self) -> dict[str, int | None]:
        """This rank's peaks; null for a device without a counter."""
        cuda = self._device.type == "cuda"
        return {
            "peak_allocated_bytes": self.allocated_bytes if cuda else None,
            "peak_reserved_bytes": self.reserved_bytes if cuda else None,
            "peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }


def disk_bytes() -> dict[str, int] | None:
    """Bytes this process has caused to be read from and written to storage, or None.

    From /proc/self/io: page-cache hits are not in it, direct I/O (libaio) is.
    """
    path = Path("/proc/self/io")
    if not path.exists():
        return None
    fields = dict(line.split(": ") for line in path.read_text().splitlines())
    return {"read_bytes": int(fields["read_bytes"]), "write_bytes": int(fields["write_bytes"])}
