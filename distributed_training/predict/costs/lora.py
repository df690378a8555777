"""Cost of LoRA adapters beside frozen weights, and of quantizing the frozen weights. No torch
import."""

import numpy as np

from distributed_training.predict.mechanism import Mechanism, Passes, Place, Timing


def block(at: Timing) -> Passes:
    """Return the cost of a block's adapters, which memory traffic binds."""
    outputs = sum(rows for rows, _ in at.size.block_matrices) / at.tp
    adapted = at.size.adapted(at.config.lora_targets)
    moved = at.moving(at.tokens * at.width * outputs)
    return np.outer((4, 7, 0), moved) * (len(adapted) / len(at.size.matrix_names))


def base_bytes(at: Place) -> int:
    """Return the bytes of the model's own parameters in the compute dtype or quantized: NF4 has 4
    bits for a value and an fp32 scale for 64."""
    saved = (16 * at.width - 9) * _values(at) // 16 if at.config.base_dtype == "nf4" else 0
    return at.width * at.parameters - at.num_blocks * saved


def dequantizing(at: Timing) -> Passes:
    """Return the cost of reading codes and scales, and of writing and reading the matrix."""
    return np.outer((1, 1, 0), at.moving((9 / 16 + at.width) * _values(at)))


def _values(at: Place) -> int:
    return sum(rows * columns for rows, columns in at.size.block_matrices)


LORA = Mechanism(used=lambda plan: plan.config.lora_rank > 0, block=block)
NF4 = Mechanism(used=lambda plan: plan.config.base_dtype == "nf4", block=dequantizing)
