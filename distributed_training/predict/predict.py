"""What a plan will need and how long it will take, before it runs. No torch import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from distributed_training.plan.plan import Plan
from distributed_training.predict.constants import FITTED
from distributed_training.predict.memory import MemoryEstimate, estimate_memory
from distributed_training.predict.rates import Rates
from distributed_training.predict.speed import StepTime, estimate_step
from distributed_training.predict.traffic import sent_by_axis

# Whether there is room: also for the most that is likely, for the least of it, or for neither.
Room = Literal["yes", "tight", "no"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Memory, and, for a GPU of which rates are known, time."""

    memory: MemoryEstimate
    room: Room
    step: StepTime | None
    kind: str  # of a step, as FITTED.likely_s has them
    likely_s: tuple[float, float] | None  # seconds of a step, from the least to the most likely
    tokens_per_s: float | None
    mfu: float | None
    sent_bytes: dict[str, float]  # axis -> bytes a step, of the process that sends most

    @property
    def fits(self) -> bool:
        """Whether it may be tried."""
        return self.room != "no"

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
            "kind": self.kind,
            "likely_s": self.likely_s and list(self.likely_s),
            "likely_bytes": list(self.memory.likely_bytes),
            "sent_bytes": self.sent_bytes,
        }


def predict(plan: Plan, rates: Rates | None, *, tokenised: bool = False) -> Prediction:
    """Predict a plan's step; `tokenised`: the samples are there already."""
    memory = estimate_memory(plan, tokenised=tokenised)
    step = None if rates is None else estimate_step(plan, rates)
    tokens_per_s = mfu = likely_s = None
    kind = "unknown"
    if step and rates:
        kind = kind_of(plan, rates, step)
        least, most = vars(FITTED.likely_s)[kind]
        likely_s = least * step.seconds, most * step.seconds
        length = plan.config.max_length
        tokens_per_s = plan.batch.global_batch_size * length / step.seconds
        if rates.peak_flops:
            used = tokens_per_s * plan.size.flops_per_token(
                length, frozen=plan.config.lora_rank > 0
            )
            mfu = used / (rates.peak_flops * plan.num_processes)
    return Prediction(
        memory=memory,
        room=find_room(plan, memory),
        step=step,
        kind=kind,
        likely_s=likely_s,
        tokens_per_s=tokens_per_s,
        mfu=mfu,
        sent_bytes=sent_by_axis(plan),
    )


def kind_of(plan: Plan, rates: Rates, step: StepTime) -> str:
    """What a step's time depends on, by which its likely error is told."""
    part = "host" if step.bound_by == "host" else "gpu"
    if rates.on_host or part in rates.measured or step.bound_by in ("disk", "host RAM"):
        return "other"
    if part == "host":
        return "host"
    if not rates.recorded:
        return "other"
    return "graph" if plan.config.cuda_graphs is True else "launched"


def find_room(plan: Plan, memory: MemoryEstimate) -> Room:
    """Whether the fullest process has room, and the host for what it holds."""
    on_host = memory.host_bytes * plan.processes_here <= plan.machine.ram_bytes
    return find_room_on_gpu(plan, memory) if on_host else "no"


def find_room_on_gpu(plan: Plan, memory: MemoryEstimate) -> Room:
    """Whether the fullest GPU has room; without GPUs there is none to be filled."""
    machine = plan.machine
    least, most = memory.likely_bytes
    if machine.num_gpus == 0 or most <= machine.gpu_memory_bytes:
        return "yes"
    return "tight" if least <= machine.gpu_memory_bytes else "no"
