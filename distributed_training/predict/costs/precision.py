"""Estimate the cost of keeping the training state in fp32 and of rounding the weights to the
compute dtype. This module does not import torch."""

from distributed_training.plan.plan import Draft
from distributed_training.predict.mechanism import (
    ComponentBytes,
    Mechanism,
    PipelineRank,
    StepPoint,
)

# Size of both Adam moments in bytes per parameter
MOMENT_BYTES = {"adamw": 8, "adamw-bf16": 4, "adamw-bf16-weights": 4}
# Size of a weight and both Adam moments in a checkpoint
SAVED_BYTES = {"adamw": 12, "adamw-bf16": 8, "adamw-bf16-weights": 6}
# Number of times that AdamW and clipping read and write the weight or the gradient of a parameter
NUM_UPDATE_ACCESSES = 3 + 3


def state_bytes(rank: PipelineRank) -> ComponentBytes:
    return {
        "parameters": rank.weight_bytes / rank.shards,
        "gradients": rank.weight_bytes / rank.shards,
        "optimizer": MOMENT_BYTES[rank.config.optimizer] / rank.shards,
    }


def rounded_weight_bytes(rank: PipelineRank, point: StepPoint) -> ComponentBytes:
    """Return the size in bytes of the rounded weights that autograd keeps for the backward pass.
    Those of blocks that recompute activations are not kept, because the recomputation rounds the
    weights again."""
    if point == "update" and (rank.plan.only_copies or rank.trained_share):
        return {}
    num_kept: float = rank.trained_parameters
    if rank.trained_share:
        num_kept -= rank.recomputed_share * rank.parameters_in_blocks
    divisor = rank.num_blocks if point == "first block" and rank.trained_share else 1
    return {"copies": 2 * num_kept / divisor}


def update_bytes(rank: PipelineRank) -> float:
    moment_bytes = 2 * MOMENT_BYTES[rank.config.optimizer]
    per_parameter = NUM_UPDATE_ACCESSES * rank.weight_bytes + moment_bytes
    return per_parameter * rank.trained_parameters / rank.shards


def uses_autocast(plan: Draft) -> bool:
    """Return whether autocast rounds fp32 weights in each forward pass. FSDP and pipelines round
    weights without autocast."""
    config = plan.config
    is_unsharded = plan.mesh["pp"] == 1 and not plan.uses_fsdp
    rounds = config.precision != "fp32" and not config.has_bf16_weights
    return is_unsharded and rounds and not plan.strategy.traits.has_master_weights


# Weights are rounded and gradients are widened in every micro-batch.
AUTOCAST = Mechanism(
    is_used=uses_autocast, additional_bytes=rounded_weight_bytes, moved_bytes=lambda rank: 12
)
FP32 = Mechanism(
    is_used=lambda plan: not plan.strategy.traits.has_master_weights,
    state=state_bytes,
    update_bytes=update_bytes,
    # If there are several ranks, Python code runs for each tensor once per step.
    hook_costs=lambda rank, rates: (1 if rank.plan.num_processes > 1 else 0, 0.0),
)
