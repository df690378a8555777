"""Estimate the cost of the model's blocks. This module does not import torch. The formulas for
element-wise operations and attention follow the code in models/, with fitted constants."""

import math

import numpy as np

from distributed_training.predict.mechanism import (
    ARITHMETIC,
    MEMORY,
    Cost,
    Mechanism,
    Moment,
    Passes,
    Place,
    Timing,
)
from distributed_training.predict.rates import FITTED

# Attention's matrix multiplications in the backward pass, relative to the forward pass
BACKWARD_ATTENTION = 5 / 2
NORM_BYTES = 2 * 2 * 4  # fp32 mean and standard deviation of two norms, per token and block


def block(at: Timing) -> Passes:
    """Return the costs of a block's matrix multiplications, attention and element-wise
    operations."""
    costs = np.zeros((3, 3))
    for n, k in _matrices(at):
        costs += at.gemm(at.tokens, k, n), at.gemm(at.tokens, n, k), at.gemm(k, at.tokens, n)
    attention = _attention(at)
    forward, backward = elementwise(at)
    costs[:2] += forward + attention, backward + BACKWARD_ATTENTION * attention
    return costs


def last_product(at: Timing) -> Cost:
    """Return the cost of a block's last matrix multiplication in the forward pass."""
    n, k = _matrices(at)[-1]
    return at.gemm(at.tokens, k, n)


def elementwise(at: Timing) -> tuple[Cost, Cost]:
    """Return the (forward, backward) costs of a block's element-wise operations. If the model was
    not traced, the backward pass is assumed to cost twice as much as the forward pass."""
    fitted = FITTED.elementwise
    eager = 1.0 if at.config.compile else fitted.eager
    starts = fitted.starts * eager * at.rates.kernel_s
    if at.size.traced is not None:
        share = FITTED.traced_traffic
        forward = at.moving(share.forward * at.traced_bytes("forward", at.way))
        backward = at.moving(share.backward * at.traced_bytes("backward", at.way))
        return forward + starts * MEMORY, backward + 2 * starts * MEMORY
    by_gpt2 = at.split_values / 12  # relative to GPT-2, whose blocks were measured
    values = fitted.between * at.between + fitted.split * by_gpt2 / at.tp
    forward = at.moving(values * eager * at.hidden) + starts * MEMORY
    return forward, 2 * forward


def _matrices(at: Place) -> list[tuple[float, float]]:
    """Return the (rows, columns) of each matrix in a block, as stored on one rank. tp splits the
    matrices alternately by rows and by columns."""
    return [
        (rows, columns / at.tp) if index % 2 else (rows / at.tp, columns)
        for index, (rows, columns) in enumerate(at.size.block_matrices)
    ]


def _attention(at: Timing) -> Cost:
    """Return the cost of causal attention in the forward pass of one decoder block.

    If records are packed, a special kernel skips the scores between different records of a
    sequence. Without this kernel, a mask only hides these scores, which costs more than causal
    attention over the whole sequence."""
    packing = at.plan.packing
    masked = packing is not None and not _has_kernel(at)
    length = at.config.max_length if masked else at.plan.attended
    rate = at.rates.attention_flops * length / (length + FITTED.attention_half)
    fitted = FITTED.packed_attention
    if at.width == 4:  # the kernel for fp32 is compute-bound at any length
        rate = at.rates.fp32_gemm_flops / 2
    elif masked:
        rate /= fitted.mask
    elif packing is not None:
        rate /= fitted.kernel
    traced = at.size.traced
    # 2 for the full square of scores, 1 for the causal half
    seen = 1 if traced is None or traced.fused else 2
    seconds = 2 * seen * at.tokens * length * at.size.attention_width / at.tp / rate
    if packing is not None and not masked:
        tiles = math.ceil(at.config.max_length / fitted.tile) * packing.max_documents
        heads = at.size.num_heads / at.tp
        seconds += tiles * heads * fitted.tile_s / (1 + BACKWARD_ATTENTION)
    return seconds * ARITHMETIC


def _has_kernel(at: Timing) -> bool:
    """Return whether models/attention.py uses a special kernel for packed records."""
    head_size = at.size.attention_width // at.size.num_heads
    on_gpu = at.config.precision == "bf16" and not at.rates.on_host
    return on_gpu and not at.config.dropout and head_size % 8 == 0 and head_size <= 256


def kept(at: Place) -> float:
    """Return the number of bytes that a block keeps for its backward pass."""
    if at.size.traced is not None:
        return at.traced_bytes("kept", at.way)
    # Values in the compute dtype that models/ and torch.compile keep, per token and hidden unit
    values = 2 * at.between + at.split_values / at.tp
    values += 2  # the inputs of both column-split layers, which tp does not split
    if at.config.dropout:  # two masks with one byte per value
        values += 2 * at.between / at.width
    return at.hidden * values + statistics_bytes(at)


def statistics_bytes(at: Place) -> float:
    """Return the size in bytes of the fp32 statistics that attention and norms keep."""
    return at.tokens * (4 * at.size.num_heads / at.tp + NORM_BYTES * at.between)


def mlp_values(at: Place) -> tuple[int, int]:
    """Return (values per token in the output of an MLP's first matrix, values per token in the
    input of the MLP's second matrix)."""
    if at.size.traced is not None:
        return at.size.values_out, at.size.values_out
    return at.size.block_matrices[2][0], at.size.block_matrices[3][1]


def backward(at: Place) -> float:
    """Return the number of additional bytes that a block's backward pass needs at its peak, which
    occurs in the MLP. These bytes hold the gradient of the first matrix's output. The gradient of
    the second matrix's input replaces that input."""
    return at.tokens * at.width * mlp_values(at)[0] / at.tp


def gradients(at: Place, moment: Moment) -> float:
    """Return which fraction of the gradients exists at a moment.

    With several micro-batches, all gradients exist. With a single micro-batch, no gradients are
    counted during the passes, because activations are freed as gradients are added. At the first
    block, only the gradients of this block and of an untied embedding are missing."""
    if at.micro_batches > 1 or moment == "update":
        return 1
    if moment == "passes":
        return 0
    block = at.learning / max(1, at.num_blocks)
    if at.trained:
        block = at.in_blocks / max(1, at.num_blocks)
        block += 0 if at.size.tied else at.embedding
    return 1 - block / at.learning


def _moved(at: Place) -> float:
    """Return the number of bytes per parameter that are read and written to add a gradient to the
    sum of earlier gradients."""
    return 10 if at.micro_batches > 1 or at.pp > 1 else 0


BLOCK = Mechanism(
    used=lambda plan: True, gradients=gradients, backward=backward, block=block, moved=_moved
)
# An engine without hooks visits each tensor once per step if there are several ranks.
TENSORS = Mechanism(
    used=lambda plan: not plan.strategy.traits.hooks_between_blocks,
    hooks=lambda at, rates: (at.plan.num_processes > 1, 0.0),
)
