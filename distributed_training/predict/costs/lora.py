"""Estimate the cost of LoRA adapters, and of quantizing the frozen weights. No torch import."""

import numpy as np

from distributed_training.predict.costs.block import backward, mlp_values
from distributed_training.predict.costs.zero import OFFLOADED
from distributed_training.predict.mechanism import Mechanism, Parts, Passes, Place, Timing


def block(at: Timing) -> Passes:
    """Return the cost of a block's adapters, which is bound by memory bandwidth."""
    outputs = sum(rows for rows, _ in at.size.block_matrices) / at.tp
    adapted = at.size.adapted(at.config.lora_targets)
    moved = at.moving(at.tokens * at.width * outputs)
    return np.outer((4, 7, 0), moved) * (len(adapted) / len(at.size.matrix_names))


def base_bytes(at: Place) -> int:
    """Return the bytes of the model's own parameters, in the compute dtype or quantized. NF4 has 4
    bits per value and an fp32 scale per 64 values."""
    saved = (16 * at.width - 9) * _values(at) // 16 if at.config.base_dtype == "nf4" else 0
    return at.width * at.parameters - at.num_blocks * saved


def frozen(at: Place) -> Parts:
    """Return the bytes of the frozen base weights. FSDP and ZeRO-3 shard them. A pipeline under
    FSDP also gathers them for all micro-batches."""
    sharded = at.plan.uses_fsdp or at.zero.stage == 3
    copies = 1 / at.shards if sharded else 1
    if at.plan.uses_fsdp and at.pp > 1:
        copies += 1
    return {OFFLOADED.get(at.strategy.offload["param"], "parameters"): copies * base_bytes(at)}


def beside_base(at: Place) -> float:
    """Return the bytes of the gradient of the second matrix's input through its adapter, which
    exists at the same time as the gradient through the base. If the block is recomputed, the
    outputs of both first matrices also exist at the same time."""
    outer, inner = mlp_values(at)
    return at.tokens * at.width * (inner + at.recomputes * outer) / at.tp


def matrix_in_use(at: Place) -> float:
    """Return the bytes by which a dequantized matrix, at the end of a block's backward pass,
    exceeds the gradients in its MLP."""
    largest = max(rows * columns for rows, columns in at.size.block_matrices)
    return max(0, at.width * largest - backward(at) - beside_base(at))


def dequantizing(at: Timing) -> Passes:
    """Return the cost of reading codes and scales, and of writing and reading the matrix."""
    return np.outer((1, 1, 0), at.moving((9 / 16 + at.width) * _values(at)))


def _values(at: Place) -> int:
    return sum(rows * columns for rows, columns in at.size.block_matrices)


LORA = Mechanism(
    used=lambda plan: plan.config.lora_rank > 0, frozen=frozen, backward=beside_base, block=block
)
NF4 = Mechanism(
    used=lambda plan: plan.config.base_dtype == "nf4", backward=matrix_in_use, block=dequantizing
)
