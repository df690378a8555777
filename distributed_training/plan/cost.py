"""State of the model, and what a pipeline schedule needs and idles. Pure arithmetic, no torch.

The rest of a process's memory is in plan/memory.py, time in plan/speed.py, bytes on the wire in
plan/traffic.py, FLOPs with the model's size. Refusals, the header, advice and documents all ask
there. p is the number of processes along the
pipeline, m the micro-batches of a step; what schedules need and cost is by the rules of
torch.distributed.pipelining and the formulas of pipedream_tutorial's closed_forms.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from distributed_training.settings.config import RunConfig
from distributed_training.settings.strategies import Strategy

# Bytes a token and unit of hidden size that a block keeps for its backward pass, in 2-byte
# arithmetic with attention that keeps no scores (Korthikanti et al., 2205.05198, section 4: 34 with
# the masks of dropout): 10 of them lie between the layers that tp divides.
BLOCK_BYTES, UNDIVIDED_BLOCK_BYTES = 34, 10


@dataclass(frozen=True, kw_only=True, slots=True)
class StateBytes:
    """Bytes of model state of one process, without activations."""

    parameters: int
    gradients: int
    optimizer: int
    host: int  # what offload keeps in RAM; `disk` in files
    disk: int

    @property
    def on_device(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def estimate_state_bytes(
    strategy: Strategy,
    num_parameters: int,
    precision: str,
    mesh: Mapping[str, int],
    *,
    own: float = 0,
) -> StateBytes:
    """Bytes of model state of the process that holds `num_parameters`, its stage's part under tp.

    With rounded weights (ZeRO paper, section 3.1): parameters 2, gradients 2, fp32 master copy and
    both Adam moments 12 bytes a parameter. Else fp32 parameters (4), gradients (4) and moments (8),
    and of a pipeline's stages also what they gather, or round, for all micro-batches of a step.
    `own`: bytes a parameter of what an algorithm or compression keeps besides.
    """
    width, shards, stage = 4 if precision == "fp32" else 2, mesh["dp_shard"], strategy.zero_stage
    each = {"parameters": 4 / shards, "gradients": 4 / shards, "optimizer": 8 / shards}
    if strategy.traits.rounded_weights:
        each["parameters"] = width / (shards if stage >= 3 else 1)
        each["gradients"] = width / (shards if stage >= 2 else 1)
        each["optimizer"] = 12 / (shards if stage >= 1 else 1)
    elif mesh["pp"] > 1:
        gathers = mesh["dp_replicate"] * shards > 1 or precision != "fp32"
        each |= {"parameters": 4 / shards + width * gathers, "gradients": 4}
    each |= {"optimizer": each["optimizer"] + own, "host": 0, "disk": 0}
    for what, part in (("optimizer", "optimizer"), ("param", "parameters")):
        device = strategy.offload_device(what)
        if device != "none":
            each["disk" if device == "nvme" else "host"] += each[part]
            each[part] = 0
    if strategy.steps_on_host:  # gradients wait in RAM, in fp32, for the optimizer step
        each |= {"host": each["host"] + 4 / shards, "gradients": 0}
    return StateBytes(**{part: round(size * num_parameters) for part, size in each.items()})


def lost_bytes(config: RunConfig, mesh: Mapping[str, int]) -> float:
    """Bytes a parameter of what compressing gradients has lost and adds to the next."""
    return {"powersgd": 4, "topk-int8": 4 + 4 / mesh["dp_replicate"]}.get(
        config.gradient_compression, 0
    )


def activation_share(tp: int, *, sequence_parallel: bool) -> float:
    """Share of a block's activations that each of `tp` processes keeps."""
    if sequence_parallel:
        return 1 / tp
    return (UNDIVIDED_BLOCK_BYTES + (BLOCK_BYTES - UNDIVIDED_BLOCK_BYTES) / tp) / BLOCK_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """What one pipeline schedule needs and costs."""

    # (p, m) -> idle share of a step if all stages took equally long and a backward pass twice a
    # forward one; None where there is no formula
    bubble: Callable[[int, int], float | None]
    # (p, m) -> micro-batches whose activations the fullest process keeps, of its whole part of
    # the model
    kept: Callable[[int, int], float]
    stages_per_rank: int = 1
    v_shaped: bool = False  # rank r holds stages r and 2 p - 1 - r instead of r and p + r
    splits_backward: bool = False  # gradients of inputs and of weights at different times
    searched: bool = False  # an order for what this model's operations take (plan/search.py)
    minimum: Callable[[int], int] = lambda p: 1  # p -> fewest micro-batches
    equal_rounds: bool = False  # m micro-batches make max(1, m // p) rounds of equal length

    def takes(self, p: int, m: int) -> bool:
        """Whether `m` micro-batches can be run over `p` processes."""
        return m >= self.minimum(p) and not (self.equal_rounds and m % max(1, m // p))

    def ranks(self, p: int) -> tuple[int, ...]:
        """The process that holds each stage, in the model's order."""
        once = tuple(range(p))
        again = once[::-1] if self.v_shaped else once
        return once + again if self.stages_per_rank == 2 else once

    def counts(self, p: int, num_sequences: int) -> list[int]:
        """Numbers of equal micro-batches that `num_sequences` can be cut into, ascending."""
        return [m for m in divisors(num_sequences) if self.takes(p, m)]


def _share(idle: int, busy: int) -> float:
    return idle / (busy + idle)


SCHEDULES: dict[str, Schedule] = {
    "1f1b": Schedule(
        bubble=lambda p, m: _share(p - 1, m), kept=lambda p, m: min(p, m), minimum=lambda p: p
    ),
    "gpipe": Schedule(bubble=lambda p, m: _share(p - 1, m), kept=lambda p, m: m),
    "interleaved": Schedule(
        bubble=lambda p, m: _share(p - 1 if m >= p else 2 * (p - m) + m - 1, 2 * m),
        kept=lambda p, m: min((3 * p - 1) / 2, m),
        stages_per_rank=2,
        equal_rounds=True,
    ),
    "zb-h1": Schedule(
        bubble=lambda p, m: _share(2 * (p - 1) - (min(m, p) - 1), 3 * m),
        kept=lambda p, m: min(p, m),
        splits_backward=True,
        equal_rounds=True,
    ),
    "zb-v": Schedule(
        bubble=lambda p, m: _share(p - 1, 6 * m) if m >= 2 * p - 1 else None,
        kept=lambda p, m: min(p, m),
        stages_per_rank=2,
        v_shaped=True,
        splits_backward=True,
    ),
    "zb-auto": Schedule(  # where operations take equally long, no order is shorter than zb-v's
        bubble=lambda p, m: _share(p - 1, 6 * m) if m >= 2 * p - 1 else None,
        kept=lambda p, m: min(p + 1, m),
        stages_per_rank=2,
        v_shaped=True,
        splits_backward=True,
        searched=True,
    ),
}
# Without a pipeline micro-batches follow each other.
NO_PIPELINE = Schedule(bubble=lambda p, m: 0.0, kept=lambda p, m: 1)


def schedule_of(config: RunConfig, strategy: Strategy, pp: int) -> Schedule:
    """The schedule that CONFIG asks for, the engine's own where it asks for another's, and none
    where there is no pipeline.
    """
    name, known = config.pipeline_schedule, strategy.traits.schedules or ("1f1b",)
    return SCHEDULES[name if name in known else known[0]] if pp > 1 else NO_PIPELINE


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
