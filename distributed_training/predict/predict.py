"""What a plan will need and how long it will take, before it runs. No torch import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distributed_training.plan.plan import Plan
from distributed_training.predict.memory import MemoryEstimate, estimate_memory
from distributed_training.predict.rates import Rates
from distributed_training.predict.speed import StepTime, estimate_step
from distributed_training.predict.traffic import sent_by_axis


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Memory, and, for a GPU of which rates are known, time."""

    memory: MemoryEstimate
    fits: bool
    step: StepTime | None
    tokens_per_s: float | None
    mfu: float | None
    sent_bytes: dict[str, float]  # axis -> bytes a step, of the process that sends most

    def as_record(self) -> dict[str, Any]:
        """What a run's record keeps of it."""
        return {
            "fits": self.fits,
            "peak_bytes": self.memory.peak_bytes,
            "memory_bytes": self.memory.fullest,
            "host_bytes": self.memory.host_bytes,
            "step_time_s": self.step and self.step.seconds,
            "tokens_per_s": self.tokens_per_s,
            "bound_by": self.step and self.step.bound_by,
            "sent_bytes": self.sent_bytes,
        }


def predict(plan: Plan, rates: Rates | None, *, tokenised: bool = False) -> Prediction:
    """Predict a plan's step; `tokenised`: the samples are there already."""
    memory = estimate_memory(plan, tokenised=tokenised)
    step = None if rates is None else estimate_step(plan, rates)
    tokens_per_s = mfu = None
    if step and rates:
        length = plan.config.max_length
        tokens_per_s = plan.batch.global_batch_size * length / step.seconds
        if rates.peak_flops:
            used = tokens_per_s * plan.size.flops_per_token(
                length, frozen=plan.config.lora_rank > 0
            )
            mfu = used / (rates.peak_flops * plan.num_processes)
    return Prediction(
        memory=memory,
        fits=fits(plan, memory),
        step=step,
        tokens_per_s=tokens_per_s,
        mfu=mfu,
        sent_bytes=sent_by_axis(plan),
    )


def fits(plan: Plan, memory: MemoryEstimate) -> bool:
    """Whether the fullest process has room, and the host for what it holds."""
    on_host = memory.host_bytes * plan.processes_here <= plan.machine.ram_bytes
    return on_host and fits_gpu(plan, memory)


def fits_gpu(plan: Plan, memory: MemoryEstimate) -> bool:
    """Whether the fullest GPU has room; without GPUs there is none to be filled."""
    machine = plan.machine
    return machine.num_gpus == 0 or memory.needed_bytes <= machine.gpu_memory_bytes
