"""Idle time of a pipeline's ranks while a step's micro-batches run, measured in two ways.

On GPUs: how long kernels ran, from one step under the profiler, as a share of how long the phase
takes without it. A profiler makes launching slower, and so the step longer, but not the kernels.
Anywhere: the begin and end of the stages' operations in the timed steps.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining.stage import PipelineStage

from distributed_training.measure.kernels import profiled
from distributed_training.parallel.pipeline import Pipeline
from distributed_training.plan.topology import Topology

PHASES = {
    Pipeline: ["forward_backward"],
    PipelineStage: ["forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"],
}
REDUCTION = "perform_reduce_grad"  # torch reduces over dp at the end of the phase


class Spans:
    """Begin and end of calls, on the GPU's clock where there is one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: dict[str, list[tuple[Any, Any]]] = {}

    def watch(self) -> None:
        """Mark every call of PHASES from now on, for the rest of the process."""
        for owner, names in PHASES.items():
            for name in names:
                setattr(owner, name, self._watched(owner.__name__, getattr(owner, name)))
        reduce = getattr(PipelineStage, REDUCTION)
        setattr(PipelineStage, REDUCTION, self._watched(REDUCTION, reduce))

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

    def seconds(self, kind: str, num_steps: int) -> list[float]:
        """Of each of the steps since `marks` was emptied: the durations of all calls in it."""
        marks = self.marks.get(kind, [])
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            found = [begin.elapsed_time(end) / 1000 for begin, end in marks]
        else:
            found = [end - begin for begin, end in marks]
        calls = len(found) // num_steps  # the same ones in every step
        return [sum(found[step * calls : (step + 1) * calls]) for step in range(num_steps)]


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


def bubble(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Idle shares of the forward and backward phase, taken as long as it is on the slowest rank.

    Of each rank: phase_s and computing_s of the median step, kernels_s of the profiled one or None.
    """
    phase = max(rank["phase_s"] for rank in ranks)
    between = _idle(phase, [rank["computing_s"] for rank in ranks])
    kernels = [rank["kernels_s"] for rank in ranks]
    if None in kernels:
        return {"phase_s": phase, **between, "from": "begin and end of operations"}
    return {
        "phase_s": phase,
        **_idle(phase, kernels),
        "from": "kernels of one profiled step",
        "between_operations": between,
    }


def _idle(phase: float, busy: list[float]) -> dict[str, Any]:
    shares = [1 - seconds / phase for seconds in busy]
    return {"idle_share": sum(shares) / len(shares), "by_rank": shares}
