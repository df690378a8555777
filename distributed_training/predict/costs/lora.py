"""Estimate the cost of LoRA adapters, and of quantizing the frozen weights. This module does not
import torch."""

import numpy as np

from distributed_training.predict.costs.block import backward_bytes, mlp_values
from distributed_training.predict.costs.zero import OFFLOADED
from distributed_training.predict.mechanism import (
    ComponentBytes,
    Mechanism,
    PassCosts,
    PipelineRank,
    Timing,
)


def adapter_costs(timing: Timing) -> PassCosts:
    """Return the costs of a block's adapters, which are bound by memory bandwidth."""
    size = timing.size
    adapted = size.adapted_parts(timing.config.lora_targets)
    matrices = zip(size.matrix_names, size.block_matrices, strict=True)
    outputs = sum(rows for name, (rows, _) in matrices if name in adapted) / timing.tp
    return np.outer((4, 7, 0), timing.memory_cost(timing.tokens * timing.dtype_bytes * outputs))


def base_bytes(rank: PipelineRank) -> int:
    """Return the size in bytes of the base model's parameters, in the compute dtype or quantized.
    NF4 uses 4 bits per value and one fp32 scale per 64 values."""
    saved = (
        (16 * rank.dtype_bytes - 9) * _num_block_values(rank) // 16
        if rank.config.base_dtype == "nf4"
        else 0
    )
    return rank.dtype_bytes * rank.parameters - rank.num_blocks * saved


def frozen_bytes(rank: PipelineRank) -> ComponentBytes:
    """Return the size in bytes of the frozen base weights, which FSDP and ZeRO stage 3 shard. A
    pipeline with FSDP also keeps gathered weights throughout all micro-batches."""
    is_sharded = rank.plan.uses_fsdp or rank.zero.stage == 3
    copies = 1 / rank.shards if is_sharded else 1
    if rank.plan.uses_fsdp and rank.pp > 1:
        copies += 1
    return {OFFLOADED.get(rank.strategy.offload["param"], "parameters"): copies * base_bytes(rank)}


def adapter_backward_bytes(rank: PipelineRank) -> float:
    """Return the number of bytes that adapters add to the peak memory of a block's backward pass.
    The peak occurs in the MLP. Two gradients of the second matrix's input exist there at the same
    time, one through the adapter and one through the base weights. With recomputation, the output
    of the first matrix is also in memory."""
    first_outputs, second_inputs = mlp_values(rank)
    return (
        rank.tokens * rank.dtype_bytes * (second_inputs + rank.recomputes * first_outputs) / rank.tp
    )


def dequantized_matrix_bytes(rank: PipelineRank) -> float:
    """Return the number of bytes by which a block's largest dequantized matrix exceeds the
    gradients in the block's MLP, or 0 if the matrix is smaller. If the matrix is larger, memory
    peaks at the end of the backward pass, when the matrix is in memory. Otherwise, memory peaks in
    the MLP."""
    largest = max(rows * columns for rows, columns in rank.size.block_matrices)
    return max(0, rank.dtype_bytes * largest - backward_bytes(rank) - adapter_backward_bytes(rank))


def dequantize_costs(timing: Timing) -> PassCosts:
    """Return the costs of dequantizing a block: reading NF4 values and writing the matrices."""
    return np.outer(
        (1, 1, 0), timing.memory_cost((9 / 16 + timing.dtype_bytes) * _num_block_values(timing))
    )


def _num_block_values(rank: PipelineRank) -> int:
    return sum(rows * columns for rows, columns in rank.size.block_matrices)


LORA = Mechanism(
    is_used=lambda plan: plan.config.lora_rank > 0,
    backward_bytes=adapter_backward_bytes,
    block_costs=adapter_costs,
)
NF4 = Mechanism(
    is_used=lambda plan: plan.config.base_dtype == "nf4",
    backward_bytes=dequantized_matrix_bytes,
    block_costs=dequantize_costs,
)
