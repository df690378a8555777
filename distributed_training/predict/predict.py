"""What a plan will need and how long it will take, before it runs. No torch import."""

from dataclasses import dataclass
from typing import Any, Literal

from distributed_training.plan.plan import Plan
from distributed_training.predict.memory import MemoryEstimate, estimate_memory
from distributed_training.predict.rates import FITTED, Rates
from distributed_training.predict.speed import StepTime, estimate_step
from distributed_training.predict.traffic import sent_by_axis

# Whether there is room: also for the most that is likely, for the least of it, or for neither.
Room = Literal["yes", "tight", "no"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A plan, its memory and, for a GPU of which rates are known, time."""

    plan: Plan
    rates: Rates | None
    memory: MemoryEstimate
    step: StepTime | None

    @property
    def room(self) -> Room:
        """Whether the fullest process has room, and the host for what it holds."""
        on_host = self.memory.host_bytes * self.plan.processes_here
        return self.room_on_gpu if on_host <= self.plan.machine.ram_bytes else "no"

    @property
    def room_on_gpu(self) -> Room:
        """Whether the fullest GPU has room; without GPUs there is none to be filled."""
        machine = self.plan.machine
        least, most = self.memory.likely_bytes
        if machine.num_gpus == 0 or most <= machine.gpu_memory_bytes:
            return "yes"
        return "tight" if least <= machine.gpu_memory_bytes else "no"

    @property
    def fits(self) -> bool:
        """Whether it may be tried."""
        return self.room != "no"

    @property
    def order(self) -> tuple[int, float]:
        """What fits first, then what may, each by time; in the strategies' order without that."""
        room = ("yes", "tight", "no").index(self.room)
        return (room, self.step.seconds if self.step else 0.0)

    @property
    def kind(self) -> str:
        """What a step's time depends on, by which FITTED.likely_s tells its likely error."""
        rates = self.rates
        if self.step is None or rates is None:
            return "unknown"
        part = "host" if self.step.bound_by == "host" else "gpu"
        if rates.on_host or part in rates.measured or self.step.bound_by in ("disk", "host RAM"):
            return "other"
        if part == "host":
            return "host"
        if not rates.recorded:
            return "other"
        return "graph" if self.plan.config.cuda_graphs is True else "launched"

    @property
    def likely_s(self) -> list[float] | None:
        """Seconds of a step, from the least to the most likely."""
        if self.step is None:
            return None
        return [share * self.step.seconds for share in vars(FITTED.likely_s)[self.kind]]

    @property
    def tokens_per_s(self) -> float | None:
        if self.step is None:
            return None
        tokens = self.plan.batch.global_batch_size * self.plan.config.max_length
        return tokens / self.step.seconds

    @property
    def mfu(self) -> float | None:
        plan = self.plan
        if self.rates is None or not self.rates.peak_flops or self.tokens_per_s is None:
            return None
        frozen = plan.config.lora_rank > 0
        flops = plan.size.flops_per_token(plan.config.max_length, frozen=frozen)
        return self.tokens_per_s * flops / (self.rates.peak_flops * plan.num_processes)

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
            "likely_s": self.likely_s,
            "likely_bytes": self.memory.likely_bytes,
            "sent_bytes": sent_by_axis(self.plan),
        }


def predict(plan: Plan, rates: Rates | None, *, tokenised: bool = False) -> Prediction:
    """Predict a plan's step; `tokenised`: the samples are there already."""
    return Prediction(
        plan=plan,
        rates=rates,
        memory=estimate_memory(plan, tokenised=tokenised),
        step=None if rates is None else estimate_step(plan, rates),
    )
