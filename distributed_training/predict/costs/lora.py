"""Estimate the cost of LoRA adapters, and of quantizing the frozen weights. This module does not
import torch."""

import numpy as np

from distributed_training.predict.costs.block import backward, mlp_values
from distributed_training.predict.costs.zero import OFFLOADED
from distributed_training.predict.mechanism import Mechanism, Parts, Passes, Place, Timing


def block(at: Timing) -> Passes:
    """Return the costs of a block's adapters, which are bound by memory bandwidth."""
    outputs = sum(rows for rows, _ in at.size.block_matrices) / at.tp
    adapted = at.size.adapted(at.config.lora_targets)
    moved = at.moving(at.tokens * at.width * outputs)
    return np.outer((4, 7, 0), moved) * (len(adapted) / len(at.size.matrix_names))


def base_bytes(at: Place) -> int:
    """Return the size in bytes of the base model's parameters, in the compute dtype or quantized.
    NF4 uses 4 bits per value and one fp32 scale per 64 values."""
    saved = (16 * at.width - 9) * _values(at) // 16 if at.config.base_dtype == "nf4" else 0
    return at.width * at.parameters - at.num_blocks * saved


def frozen(at: Place) -> Parts:
    """Return the size in bytes of the frozen base weights, which FSDP and ZeRO stage 3 shard. A
    pipeline with FSDP also keeps gathered weights throughout all micro-batches."""
    sharded = at.plan.uses_fsdp or at.zero.stage == 3
    copies = 1 / at.shards if sharded else 1
    if at.plan.uses_fsdp and at.pp > 1:
        copies += 1
    return {OFFLOADED.get(at.strategy.offload["param"], "parameters"): copies * base_bytes(at)}


def beside_base(at: Place) -> float:
    """Return the number of bytes that adapters add to the peak of a block's backward pass, which
    occurs in the MLP. The gradient of the second matrix's input through its adapter coexists with
    the gradient through the base weights. Recomputation adds the first matrix's output."""
    outer, inner = mlp_values(at)
    return at.tokens * at.width * (inner + at.recomputes * outer) / at.tp


def matrix_in_use(at: Place) -> float:
    """Return the number of bytes by which a dequantized matrix, at the end of a block's backward
    pass, exceeds the gradients in the block's MLP. Return 0 if the matrix is smaller."""
    largest = max(rows * columns for rows, columns in at.size.block_matrices)
    return max(0, at.width * largest - backward(at) - beside_base(at))


def dequantizing(at: Timing) -> Passes:
    """Return the costs of dequantizing a block: reading NF4 values and writing the matrices."""
    return np.outer((1, 1, 0), at.moving((9 / 16 + at.width) * _values(at)))


def _values(at: Place) -> int:
    return sum(rows * columns for rows, columns in at.size.block_matrices)


LORA = Mechanism(
    used=lambda plan: plan.config.lora_rank > 0, frozen=frozen, backward=beside_base, block=block
)
NF4 = Mechanism(
    used=lambda plan: plan.config.base_dtype == "nf4", backward=matrix_in_use, block=dequantizing
)
