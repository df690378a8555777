"""Idle time of a pipeline's ranks while a step's micro-batches run, measured in two ways.

On GPUs: how long kernels ran, from one step under the profiler, as a share of how long the phase
takes without it. A profiler makes launching slower, and so the step longer, but not the kernels.
Copies count as computing, too, but not NCCL's kernels, which run as long as they wait.
Anywhere: the begin and end of the stages' operations in the timed steps.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.pipelining.stage import PipelineStage

from distributed_training.parallel.pipeline import Pipeline
from distributed_training.plan.topology import Topology

REDUCTION = "perform_reduce_grad"  # torch reduces over dp at the end of the phase
WATCHED: dict[str, tuple[Any, list[str]]] = {
    "phase": (Pipeline, ["forward_backward"]),
    "reduction": (PipelineStage, [REDUCTION]),
    "computing": (
        PipelineStage,
        ["forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"],
    ),
}


class Spans:
    """Begin and end of calls, on the GPU's clock where there is one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: dict[str, list[tuple[Any, Any]]] = {}

    def watch(self) -> None:
        """Mark every call of WATCHED from now on, for the rest of the process."""
        for kind, (owner, names) in WATCHED.items():
            for name in names:
                setattr(owner, name, self._watched(kind, getattr(owner, name)))

    def _watched(self, kind: str, function: Any) -> Any:
        def call(*arguments: Any, **words: Any) -> Any:
            begin = self._now()
            result = function(*arguments, **words)
            self.marks.setdefault(kind, []).append((begin, self._now()))
            return result

        return call

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, kind: str, num_steps: int) -> np.ndarray:
        """Of each of the steps since `marks` was emptied: the durations of all calls in it."""
        marks = self.marks.get(kind, [])
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            found = [begin.elapsed_time(end) / 1000 for begin, end in marks]
        else:
            found = [end - begin for begin, end in marks]
        # The same calls in every step.
        return np.array([calls.sum() for calls in np.array_split(found, num_steps)])


def traced(engine: Any, batch: Any, topology: Topology) -> float | None:
    """Seconds in which this rank's GPU computed in the forward and backward phase of one more step;
    None without a GPU or a pipeline of ours. Collective."""
    pipeline = getattr(engine, "pipeline", None)
    if pipeline is None or topology.device_type != "cuda":
        return None
    phase, found = pipeline.forward_backward, []

    def under_profiler(*arguments: Any) -> Any:
        # What follows the phase, torch does inside of it: put off, so that the trace is without.
        reduce, put_off = getattr(PipelineStage, REDUCTION), []
        setattr(PipelineStage, REDUCTION, lambda *words: put_off.append(words))
        dist.barrier()
        try:
            result, seconds = profiled(lambda: phase(*arguments))
        finally:
            setattr(PipelineStage, REDUCTION, reduce)
        for words in put_off:
            reduce(*words)
        found.append(seconds)
        return result

    pipeline.forward_backward = under_profiler
    engine.train_step(batch)
    return found[0]


def profiled(function: Callable[[], Any]) -> tuple[Any, float]:
    """What `function` returns, and for how many seconds the GPU computed for it."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        result = function()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        return result, busy_seconds(json.loads(Path(file.name).read_text()))


def busy_seconds(trace: dict[str, Any]) -> float:
    """Of a Chrome trace, whose times are microseconds."""
    spans = [
        (event["ts"], event["ts"] + event["dur"])
        for event in trace["traceEvents"]
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        and "nccl" not in event["name"].lower()
    ]
    if not spans:
        raise ValueError("the trace shows no kernel")
    return union(spans) / 1e6


def union(spans: Iterable[tuple[float, float]]) -> float:
    """Length of what the spans cover together: streams that compute at the same time count once."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def bubble(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Idle shares of the forward and backward phase, taken as long as it is on the slowest rank.

    Of each rank: phase_s and computing_s of the median step, kernels_s of the profiled one or None.
    """
    phase = max(rank["phase_s"] for rank in ranks)

    def idle(busy: str) -> dict[str, Any]:
        shares = [1 - rank[busy] / phase for rank in ranks]
        return {"idle_share": sum(shares) / len(shares), "by_rank": shares}

    between = idle("computing_s")
    if ranks[0]["kernels_s"] is None:
        return {"phase_s": phase, **between, "from": "begin and end of operations"}
    found = {"phase_s": phase, **idle("kernels_s"), "from": "kernels of one profiled step"}
    return {**found, "between_operations": between}
