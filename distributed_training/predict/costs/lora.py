"""Estimate the cost of LoRA adapters, and of quantizing the frozen weights. This module does not
import torch."""

import math

from distributed_training.predict.costs.block import backward_bytes, mlp_values
from distributed_training.predict.costs.zero import OFFLOADED
from distributed_training.predict.mechanism import (
    NO_COST,
    ComponentBytes,
    Cost,
    Mechanism,
    PassCosts,
    PipelineRank,
    Sizes,
    Timing,
    page_locked_bytes,
)
from distributed_training.predict.rates import FITTED


def adapter_costs(timing: Timing) -> PassCosts:
    """Return the costs of a block's adapters, which are bound by memory bandwidth. They count how
    often the outputs of the matrices are written or read. This happens less often if the product
    with a matrix is added to the adapters' output (parallel/lora.py), and for the first matrix of a
    fused MLP (parallel/gated_mlp.py)."""
    config = timing.config
    adapted = timing.kind.adapted_matrices(config.lora_targets)
    matrices = zip(timing.kind.hf_matrices, timing.kind.matrices, strict=True)
    outputs = {name: rows / timing.tp for name, (rows, _) in matrices if name in adapted}
    fused = {name for gate, up, *_ in _fused_mlps(timing) for name in (gate, up)}
    in_fused = sum(outputs.pop(name) for name in fused)
    adds_product = timing.tp == 1 and not config.lora_dropout and config.base_dtype != "fp8"
    times_forward, times_backward = (2, 5) if adds_product else (4, 7)
    values = math.fsum(outputs.values())
    forward = times_forward * values
    inputs = times_backward * values + 2.5 * in_fused
    rows_of = {(rows, columns): count for rows, columns, count in timing.kind.expert_products}
    experts_s = 0.0  # for one product of each expert's adapters
    for experts, rows, columns in timing.kind.adapted_stacks(config.lora_targets).values():
        experts_s += FITTED.expert_product_s * experts
        # models/hub/experts.py adds products of adapters separately.
        num_outputs = rows * rows_of[rows, columns] * timing.hidden_share
        forward += 4 * num_outputs
        inputs += 7 * num_outputs
    # A and B are multiplied once in the forward pass. In the backward pass, they and the gradients
    # of both are.
    return PassCosts(
        forward=timing.memory_cost(forward * timing.value_bytes) + Cost(memory_s=2 * experts_s),
        inputs=timing.memory_cost(inputs * timing.value_bytes) + Cost(memory_s=4 * experts_s),
    )


def unsaved_bytes(rank: PipelineRank, recomputed: float) -> float:
    """Return the size in bytes, as a negative number, of the activations of a block that are
    computed again although it has no activation checkpointing: the outputs of two norms, if no
    block has any (parallel/blocks.py), and the input of the MLP's second matrix, if it is an
    element-wise function of the first matrix's output or if the MLP is fused
    (parallel/gated_mlp.py)."""
    config = rank.config
    if rank.tp > 1 or rank.strategy.traits.has_parameter_hooks:
        return 0
    keeps_least = config.compile and recomputed == 0
    shapes = dict(zip(rank.kind.hf_matrices, rank.kind.matrices, strict=True))
    values: float = sum(shapes[down][1] for _, _, down, _ in _fused_mlps(rank))
    if not rank.kind.traced_values:
        first_outputs, second_inputs = mlp_values(rank)
        if config.compile and first_outputs == second_inputs:
            values = second_inputs
        values += 2 * rank.size.hidden_size if keeps_least else 0
    elif keeps_least:
        saved = rank.split_values("compiled") - rank.split_values("adapters")
        values = saved * rank.size.hidden_size
    return -(1 - recomputed) * rank.value_bytes * values


def _fused_mlps(sizes: Sizes) -> list[tuple[str, str, str, str]]:
    """Return the MLPs that parallel/gated_mlp.py computes in a block."""
    if not sizes.plan.fuses_gated_mlps:
        return []
    return sizes.kind.fused_mlps(sizes.config.lora_targets)


def base_bytes(rank: PipelineRank) -> int:
    """Return the size in bytes of the base model's parameters, in the compute dtype or quantized.
    NF4 uses 4 bits per value and one 8-bit scale per 64 values. fp8 uses 8 bits per value. In both,
    the numbers that belong to a whole row are not counted."""
    num_values = sum(share * _num_block_values(sizes) for share, sizes in rank.by_kind())
    saved = (rank.dtype_bytes - _stored_bytes(rank)) * num_values
    return rank.dtype_bytes * rank.parameters - round(rank.num_blocks * saved)


def resting_bytes(rank: PipelineRank) -> float:
    """Return the size in bytes of the stacks of experts that FSDP does not gather."""
    return _stored_bytes(rank) * rank.resting_parameters


def _stored_bytes(rank: PipelineRank) -> float:
    """Return the size in bytes of one value of a matrix in a block."""
    bits = {"nf4": 4.125, "fp8": 8.0}
    return bits.get(rank.config.base_dtype or "", 8.0 * rank.dtype_bytes) / 8


def frozen_bytes(rank: PipelineRank) -> ComponentBytes:
    """Return the size in bytes of the frozen base weights, which FSDP and ZeRO stage 3 shard. A
    pipeline with FSDP also keeps gathered weights throughout all micro-batches."""
    if rank.plan.embeds_from_host:
        embedding = rank.dtype_bytes * rank.embedding_parameters
        return {"parameters": base_bytes(rank) - embedding, "host": page_locked_bytes(embedding)}
    is_sharded = rank.plan.uses_fsdp or rank.zero.stage == 3
    copies = 1 / rank.shards if is_sharded else 1
    if rank.plan.uses_fsdp and rank.pp > 1:
        copies += 1
    return {OFFLOADED.get(rank.strategy.offload["param"], "parameters"): copies * base_bytes(rank)}


def adapter_backward_bytes(rank: PipelineRank, recomputed: float) -> float:
    """Return the number of bytes that adapters add to the peak memory of a block's backward pass.
    The peak occurs in the MLP. Two gradients of the second matrix's input exist there at the same
    time, one through the adapter and one through the base weights. With recomputation, the output
    of the first matrix is also in memory. A fused MLP adds neither to a recomputed block."""
    first_outputs, second_inputs = mlp_values(rank)
    values = second_inputs
    if recomputed == 1:
        values = 0 if _fused_mlps(rank) else second_inputs + first_outputs
    return rank.value_bytes * values / rank.tp


def dequantized_matrix_bytes(rank: PipelineRank, recomputed: float) -> float:
    """Return the number of bytes by which a block's largest dequantized matrix, or stack of experts
    with the gradients of its rows, exceeds the gradients in the block's MLP, or 0 if it is smaller.
    If it is larger, memory peaks at the end of the backward pass, when it is in memory. Otherwise,
    memory peaks in the MLP."""
    stacks = map(math.prod, rank.kind.stacks.values())
    largest = max([*map(math.prod, rank.kind.quantized_shapes), *stacks], default=0)
    products = rank.kind.expert_products
    row_values = max((count * (rows + columns) for rows, columns, count in products), default=0)
    mlp_bytes = backward_bytes(rank, recomputed) + adapter_backward_bytes(rank, recomputed)
    return max(0, rank.dtype_bytes * largest + rank.value_bytes * row_values - mlp_bytes)


def dequantize_costs(timing: Timing) -> PassCosts:
    """Return the costs of dequantizing a block: reading NF4 values and writing the matrices."""
    moved_bytes = (33 / 64 + timing.dtype_bytes) * _num_block_values(timing)
    cost = timing.memory_cost(moved_bytes)
    return PassCosts(forward=cost, inputs=cost)


def fp8_costs(timing: Timing) -> PassCosts:
    """Return by how much the costs of a block change if its matrices are multiplied in fp8. The
    other operand of each product is quantized, and the backward pass transposes the matrices."""
    saved_share = 1 / FITTED.fp8_speed - 1
    quantized_bytes = (timing.dtype_bytes + 1) * timing.tokens
    forward = inputs = NO_COST
    for rows, columns in timing.kind.quantized_shapes:
        forward += saved_share * timing.gemm_cost(timing.tokens, columns, rows)
        forward += timing.memory_cost(quantized_bytes * columns)
        inputs += saved_share * timing.gemm_cost(timing.tokens, rows, columns)
        inputs += timing.memory_cost(quantized_bytes * rows + 2 * rows * columns)
    return PassCosts(forward, inputs)


def fp8_bytes(rank: PipelineRank, recomputed: float) -> float:
    """Return the number of bytes that fp8 adds to the peak memory of a block's backward pass: the
    quantized gradient and the transposed copy of the largest matrix."""
    sizes = [rows * columns + rank.tokens * rows for rows, columns in rank.kind.quantized_shapes]
    return max(sizes, default=0)


def _num_block_values(sizes: Sizes) -> float:
    return sizes.kind.stack_values + sum(map(math.prod, sizes.kind.quantized_shapes))


LORA = Mechanism(
    is_used=lambda plan: plan.config.lora_rank > 0,
    activation_bytes=unsaved_bytes,
    backward_bytes=adapter_backward_bytes,
    block_costs=adapter_costs,
)
NF4 = Mechanism(
    is_used=lambda plan: plan.config.base_dtype == "nf4",
    backward_bytes=dequantized_matrix_bytes,
    block_costs=dequantize_costs,
)
FP8 = Mechanism(
    is_used=lambda plan: plan.config.base_dtype == "fp8",
    backward_bytes=fp8_bytes,
    block_costs=fp8_costs,
)
