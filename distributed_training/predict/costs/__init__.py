"""Estimate the memory, communication volume and time of a step, with one file per mechanism. This
module does not import torch. To add a mechanism, add a file, and add a line to MECHANISMS."""

from distributed_training.plan.plan import Draft
from distributed_training.predict.costs import (
    block,
    checkpointing,
    cp,
    dp,
    ep,
    fsdp,
    lora,
    loss,
    pp,
    precision,
    tp,
    zero,
)
from distributed_training.predict.mechanism import Mechanism

# Costs are added up in this order.
MECHANISMS = (
    lora.LORA,
    lora.NF4,
    lora.FP8,
    block.BLOCK,
    precision.FP32,
    precision.AUTOCAST,
    loss.TIED,
    dp.DP,
    fsdp.FSDP,
    zero.ZERO,
    pp.PP,
    tp.TP,
    cp.CP,
    ep.EP,
    checkpointing.NONE,
    checkpointing.FULL,
    checkpointing.OFFLOAD,
    checkpointing.OFFLOAD_ATTENTION,
    checkpointing.SELECTIVE,
)


def used_by(plan: Draft) -> list[Mechanism]:
    """Return the mechanisms that a plan uses."""
    return [mechanism for mechanism in MECHANISMS if mechanism.is_used(plan)]
