"""Bytes of model state of a process. No torch import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distributed_training.plan.plan import Plan
from distributed_training.predict.traffic import Formulas, formulas_by_place
from distributed_training.settings.strategies import Strategy


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


def estimate_state(plan: Plan) -> StateBytes:
    """Of the process that holds most of the model."""
    return state_of(max(formulas_by_place(plan), key=lambda process: process.parameters))


def state_of(process: Formulas) -> StateBytes:
    """Of one process."""
    plan = process.plan
    each = bytes_a_parameter(plan.strategy, plan.config.precision, plan.mesh)
    each["optimizer"] += own_bytes(plan)
    parts = {part: size * process.learning for part, size in each.items()}
    if process.frozen:
        divided = plan.uses_fsdp or plan.strategy.zero_stage == 3
        frozen = process.width / process.shards if divided else process.width
        if plan.uses_fsdp and process.pp > 1:  # gathered whole for all micro-batches
            frozen += process.width
        device = plan.strategy.offload["param"]
        where = {"none": "parameters", "cpu": "host", "nvme": "disk"}[device]
        parts[where] += frozen * process.parameters
    return StateBytes(**{part: round(size) for part, size in parts.items()})


def bytes_a_parameter(
    strategy: Strategy, precision: str, mesh: Mapping[str, int]
) -> dict[str, float]:
    """Part of StateBytes -> bytes a parameter of a process's part of the model under tp and pp.

    With rounded weights (ZeRO paper, section 3.1): parameters 2, gradients 2, fp32 master copy and
    both Adam moments 12 bytes a parameter. Else fp32 parameters (4), gradients (4) and moments (8),
    and of a pipeline's stages also what they gather, or round, for all micro-batches of a step.
    """
    width = 4 if precision == "fp32" else 2
    shards = mesh["dp_shard"]
    stage = strategy.zero_stage
    each = {"parameters": 4 / shards, "gradients": 4 / shards, "optimizer": 8 / shards}
    if strategy.traits.rounded_weights:
        each["parameters"] = width / (shards if stage >= 3 else 1)
        each["gradients"] = width / (shards if stage >= 2 else 1)
        each["optimizer"] = 12 / (shards if stage >= 1 else 1)
    elif mesh["pp"] > 1:
        if mesh["dp_replicate"] * shards > 1 or precision != "fp32":
            each["parameters"] += width
        each["gradients"] = 4
    each |= {"host": 0, "disk": 0}
    for what, part in (("optimizer", "optimizer"), ("param", "parameters")):
        device = strategy.offload[what]
        if device != "none":
            each["disk" if device == "nvme" else "host"] += each[part]
            each[part] = 0
    if strategy.steps_on_host:  # gradients wait in RAM, in fp32, for the optimizer step
        each["host"] += 4 / shards
        each["gradients"] = 0
    return each


def own_bytes(plan: Plan) -> float:
    """Bytes a parameter that a process's engine keeps, or compression for the next gradients."""
    kept = plan.options.bytes_a_parameter()
    if plan.config.gradient_compression == "powersgd":
        return kept + 4
    if plan.config.gradient_compression == "topk-int8":
        return kept + 4 + 4 / plan.mesh["dp_replicate"]
    return kept


def estimate_copy(plan: Plan) -> int:
    """Bytes that a process copies for a checkpoint: weights and moments in fp32, which all that
    hold the same divide, and what each process has for itself."""
    if plan.config.checkpoint_every in (0, "signal") or plan.strategy.swaps_to_disk:
        return 0
    held = max(process.learning for process in formulas_by_place(plan))
    each = 12 / (plan.mesh["dp_replicate"] * plan.mesh["dp_shard"]) + own_bytes(plan)
    if plan.options.steps_between_exchanges() is not None:  # no two replicas hold the same
        each += 12
    return round(held * each)
