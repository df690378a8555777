"""Estimate the cost of training state in fp32, and of rounding it to the compute dtype. This module
does not import torch."""

from distributed_training.plan.plan import Draft
from distributed_training.predict.mechanism import Mechanism, Moment, Parts, Place

# Size of the Adam moments in bytes per parameter. torchao's 8-bit moments have one fp32 scale per
# 256 values.
MOMENT_BYTES = {"adamw": 8, "adamw-bf16": 4, "adamw-8bit": 2 * (1 + 4 / 256)}
# Bytes per parameter that AdamW and clipping read and write for weights and gradients
UPDATE_BYTES = 12 + 12


def state(at: Place) -> Parts:
    return {
        "parameters": 4 / at.shards,
        "gradients": 4 / at.shards,
        "optimizer": MOMENT_BYTES[at.config.optimizer] / at.shards,
    }


def rounded(at: Place, moment: Moment, state: Parts) -> Parts:
    """Return the size in bytes of the rounded weights that autograd keeps for the backward pass.
    Recomputed blocks round their weights again."""
    if moment == "update" and (at.plan.only_copies or at.trained):
        return {}
    kept = at.learning
    if at.trained and at.recomputes:
        kept = at.around
    shares = max(1, at.num_blocks) if moment == "first block" and at.trained else 1
    return {"copies": 2 * kept / shares}


def updated(at: Place) -> float:
    return (UPDATE_BYTES + 2 * MOMENT_BYTES[at.config.optimizer]) * (at.learning / at.shards)


def rounds_in_passes(plan: Draft) -> bool:
    """Return whether autocast rounds fp32 weights in each forward pass. FSDP and pipelines round
    weights without autocast."""
    whole = plan.mesh["pp"] == 1 and not plan.uses_fsdp
    return whole and plan.config.precision != "fp32" and not plan.strategy.traits.rounds_weights


# Weights are rounded and gradients are widened in every micro-batch.
AUTOCAST = Mechanism(used=rounds_in_passes, held=rounded, moved=lambda at: 12)
FP32 = Mechanism(
    used=lambda plan: not plan.strategy.traits.rounds_weights, state=state, updated=updated
)
