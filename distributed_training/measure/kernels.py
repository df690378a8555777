"""How long a GPU computed, from the trace of torch's profiler.

Kernels and copies count as computing, all but NCCL's: those that wait for a message run as long as
they wait. What runs at the same time on several streams counts once.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

_ON_THE_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def profiled(function: Callable[[], Any]) -> tuple[Any, float]:
    """What `function` returns, and for how many seconds the GPU computed for it."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        result = function()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return result, busy_seconds(json.loads(path.read_text()))


def busy_seconds(trace: dict[str, Any]) -> float:
    """Of a Chrome trace, whose times are microseconds."""
    spans = [
        (event["ts"], event["ts"] + event["dur"])
        for event in trace["traceEvents"]
        if event.get("cat") in _ON_THE_GPU and "nccl" not in event["name"].lower()
    ]
    if not spans:
        raise ValueError("the trace shows no kernel")
    return union(spans) / 1e6


def union(spans: Iterable[tuple[float, float]]) -> float:
    """Length of what the spans cover together."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
