"""Estimate the cost of keeping the training state in fp32 and of rounding the weights to the
compute dtype. This module does not import torch."""

from distributed_training.plan.plan import Draft
from distributed_training.predict.mechanism import (
    ComponentBytes,
    Mechanism,
    PipelineRank,
    StepPoint,
)

# Size of the Adam moments in bytes per parameter. torchao's 8-bit moments have one fp32 scale per
# 256 values.
MOMENT_BYTES = {"adamw": 8, "adamw-bf16": 4, "adamw-8bit": 2 * (1 + 4 / 256)}
# Bytes per parameter that AdamW and clipping read and write for weights and gradients
UPDATE_BYTES = 12 + 12


def state_bytes(rank: PipelineRank) -> ComponentBytes:
    return {
        "parameters": 4 / rank.shards,
        "gradients": 4 / rank.shards,
        "optimizer": MOMENT_BYTES[rank.config.optimizer] / rank.shards,
    }


def rounded_weight_bytes(
    rank: PipelineRank, point: StepPoint, state: ComponentBytes
) -> ComponentBytes:
    """Return the size in bytes of the rounded weights that autograd keeps for the backward pass.
    With recomputation, the rounded weights of blocks are not kept, because the recomputation rounds
    the weights again."""
    if point == "update" and (rank.plan.only_copies or rank.trained_share):
        return {}
    num_kept = rank.trained_parameters
    if rank.trained_share and rank.recomputes:
        num_kept = rank.parameters_outside_blocks
    divisor = max(1, rank.num_blocks) if point == "first block" and rank.trained_share else 1
    return {"copies": 2 * num_kept / divisor}


def update_bytes(rank: PipelineRank) -> float:
    return (UPDATE_BYTES + 2 * MOMENT_BYTES[rank.config.optimizer]) * (
        rank.trained_parameters / rank.shards
    )


def uses_autocast(plan: Draft) -> bool:
    """Return whether autocast rounds fp32 weights in each forward pass. FSDP and pipelines round
    weights without autocast."""
    is_unsharded = plan.mesh["pp"] == 1 and not plan.uses_fsdp
    return is_unsharded and plan.config.precision != "fp32" and not plan.strategy.traits.takes_json


# Weights are rounded and gradients are widened in every micro-batch.
AUTOCAST = Mechanism(
    is_used=uses_autocast, additional_bytes=rounded_weight_bytes, moved_bytes=lambda rank: 12
)
FP32 = Mechanism(
    is_used=lambda plan: not plan.strategy.traits.takes_json,
    state=state_bytes,
    update_bytes=update_bytes,
)
