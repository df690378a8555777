"""Estimate the cost of the model's blocks. This module does not import torch. The formulas for
element-wise operations and attention follow the code in models/, with fitted constants."""

import math

from distributed_training.predict.mechanism import (
    GRADIENT_SUM_BYTES,
    NO_COST,
    Cost,
    Mechanism,
    PassCosts,
    PipelineRank,
    Sizes,
    StepPoint,
    Timing,
)
from distributed_training.predict.rates import FITTED

# Attention's matrix multiplications in the backward pass, relative to the forward pass
BACKWARD_ATTENTION = 5 / 2
NORM_BYTES = 2 * 2 * 4  # fp32 mean and standard deviation of two norms, per token and block


def block_costs(timing: Timing) -> PassCosts:
    """Return the total costs of a block's matrix multiplications, attention and element-wise
    operations for each pass."""
    forward = inputs = weights = NO_COST
    for num_tokens, n, k in matrix_products(timing):
        forward += timing.gemm_cost(num_tokens, k, n)
        inputs += timing.gemm_cost(num_tokens, n, k)
        weights += timing.gemm_cost(k, num_tokens, n)
    expert_counts = [experts for experts, *_ in timing.kind.stacks.values()]
    num_experts = max(expert_counts, default=0)
    if expert_counts:  # short kernels choose, count and sort
        routing = Cost(memory_s=FITTED.routing_starts * FITTED.kernel_s)
        forward += routing
        inputs += 2 * routing
    for n, k, rows_per_token in timing.kind.expert_products:
        num_rows = timing.tokens * timing.hidden_share * rows_per_token
        # Tiles of matrices are partly empty at the end of each expert's rows.
        factor = 1 + num_experts * FITTED.grouped_rows / num_rows
        # The rows are gathered and read, and the results are written and read. The gradients of
        # both move twice as much. elementwise_costs counts the activation function.
        row_bytes = (n + k) * timing.dtype_bytes
        moved = timing.memory_cost(2 * num_rows * row_bytes)
        forward += factor * timing.gemm_cost(num_rows, k, n) + moved
        inputs += factor * timing.gemm_cost(num_rows, n, k) + 2 * moved
        weights += factor * timing.gemm_cost(k, num_rows, n)
    state_flops = 2 * timing.tokens * timing.hidden_share * timing.kind.state_products
    attention = attention_cost(timing)
    state_rate = timing.rates.linear_attention * timing.rates.attention_flops
    attention += Cost(arithmetic_s=state_flops / state_rate)
    elementwise_forward, elementwise_backward = elementwise_costs(timing)
    forward += elementwise_forward + attention
    inputs += elementwise_backward + BACKWARD_ATTENTION * attention
    return PassCosts(forward, inputs, weights)


def elementwise_costs(timing: Timing) -> tuple[Cost, Cost]:
    """Return the (forward, backward) costs of a block's element-wise operations. The backward pass
    is assumed to cost twice as much as the forward pass."""
    fitted = FITTED.elementwise
    eager_factor = 1.0 if timing.config.compile else fitted.eager
    start_s = fitted.starts * eager_factor * FITTED.kernel_s
    relative_size = timing.split_values("compiled") / 12  # GPT-2's blocks were measured
    values = fitted.between * timing.hidden_share + fitted.split * relative_size / timing.tp
    moved_bytes = values * timing.hidden_bytes * eager_factor
    forward = timing.memory_cost(moved_bytes) + Cost(memory_s=start_s)
    return forward, 2 * forward


def matrix_shapes(sizes: Sizes) -> list[tuple[float, float]]:
    """Return the (rows, columns) of each matrix in a block, as stored on one rank."""
    shapes = []
    for name, (rows, columns) in zip(sizes.kind.hf_matrices, sizes.kind.matrices, strict=True):
        parts = {sizes.kind.cut_dim(name): sizes.tp}
        shapes.append((rows / parts.get(0, 1), columns / parts.get(1, 1)))
    return shapes


def matrix_products(sizes: Sizes) -> list[tuple[float, float, float]]:
    """Return (tokens of a micro-batch that a rank multiplies, rows, columns) for each matrix in a
    block. Only in the regions that tp shards, a rank computes all tokens."""
    return [
        (sizes.tokens * (1 if sizes.kind.sees_all_tokens(name) else sizes.hidden_share), *shape)
        for name, shape in zip(sizes.kind.hf_matrices, matrix_shapes(sizes), strict=True)
    ]


def attention_cost(timing: Timing) -> Cost:
    """Return the cost of causal attention in the forward pass of one decoder block.

    If records are packed, a special kernel skips the scores between different records of a
    sequence. Without this kernel, all scores are computed, and a mask hides the scores between
    records. Masked attention costs more than causal attention over the whole sequence."""
    on_gpu = timing.config.precision == "bf16" and not timing.rates.on_host
    is_fast = on_gpu and not timing.config.dropout
    head_size = timing.kind.attention_width // timing.size.num_heads
    # models/attention.py has a special kernel for packed records and windows.
    has_kernel = is_fast and head_size % 8 == 0 and head_size <= 256
    packing = timing.plan.packing
    uses_mask = packing is not None and not has_kernel
    length: float = timing.config.max_length if uses_mask else timing.plan.attention_span
    window = timing.kind.window
    if window is not None and window < length and has_kernel:
        length = window * (2 - window / length)  # twice the mean number of visible tokens
    is_wide = is_fast and head_size > 256  # uses models/wide_attention.py
    rate = timing.rates.attention_flops * length / (length + FITTED.attention_half)
    if timing.kind.attention_width >= 128 * timing.size.num_heads:
        rate *= timing.rates.wide_attention
    fitted = FITTED.packed_attention
    if timing.dtype_bytes == 4:  # the kernel for fp32 is compute-bound at any length
        rate = timing.rates.fp32_gemm_flops / 2
    elif packing is not None and not is_wide:
        rate /= fitted.mask if uses_mask else fitted.kernel
    # 2 for the full square of scores, 1 for the causal half
    num_halves = 1 if timing.kind.fuses_attention else 2
    seconds = (
        2 * num_halves * timing.tokens * length * timing.kind.attention_width / timing.tp / rate
    )
    if packing is not None and not uses_mask:
        tiles = math.ceil(timing.config.max_length / fitted.tile) * packing.max_documents
        heads = timing.size.num_heads / timing.tp / timing.cp
        seconds += tiles * heads * fitted.tile_s / (1 + BACKWARD_ATTENTION)
    cost = Cost(arithmetic_s=seconds)
    if is_wide:
        num_scores = timing.tokens * length * timing.size.num_heads / timing.tp / 2
        cost += timing.memory_cost(FITTED.score_bytes * num_scores)
    return cost


def activation_bytes(rank: PipelineRank) -> float:
    """Return the number of bytes that a block keeps for its backward pass."""
    # Values in the compute dtype that models/ and torch.compile keep, per token and hidden unit
    values = 2 * rank.hidden_share + rank.split_values(rank.compile_mode) / rank.tp
    # The inputs of the regions that tp shards, which are gathered, and those of other matrices
    num_regions = rank.kind.num_regions
    values += num_regions + (2 - num_regions) * rank.hidden_share
    num_kv_heads = rank.size.num_kv_heads or rank.size.num_heads
    if rank.config.precision != "bf16" and rank.plan.machine.num_gpus:
        # models/attention.py repeats k and v for each query head.
        repeated = 2 * rank.kind.attention_width * (1 - num_kv_heads / rank.size.num_heads)
        values += repeated / rank.size.hidden_size / rank.tp
    has_rms_norms = rank.size.final_norm_parameters == rank.size.hidden_size
    if has_rms_norms and rank.compile_mode == "eager" and rank.dtype_bytes == 4:
        # Blocks are traced in bf16, in which two norms keep fp32 copies of their inputs.
        values -= 4
    if rank.config.dropout:  # two masks with one byte per value
        values += 2 * rank.hidden_share / rank.dtype_bytes
    return rank.hidden_bytes * values + statistics_bytes(rank)


def statistics_bytes(rank: PipelineRank) -> float:
    """Return the size in bytes of the fp32 statistics that attention and norms keep."""
    return rank.tokens * (4 * rank.size.num_heads / rank.tp + NORM_BYTES * rank.hidden_share)


def mlp_values(sizes: Sizes) -> tuple[int, int]:
    """Return (values per token in the outputs of an MLP's first matrices, values per token in the
    input of its last matrix). They are a block's longest outputs and longest input."""
    rows, columns = zip(*sizes.kind.matrices, strict=True)
    return rows.count(max(rows)) * max(rows), max(columns)


def backward_bytes(rank: PipelineRank, recomputed: float) -> float:
    """Return the number of additional bytes that a block's backward pass needs at its peak. The
    peak occurs in the MLP, where these bytes hold the gradients of the first matrices' outputs. The
    gradient of the last matrix's input needs no additional bytes, because it replaces that
    input."""
    return rank.value_bytes * mlp_values(rank)[0] / rank.tp


def gradient_share(rank: PipelineRank, point: StepPoint) -> float:
    """Return the fraction of the gradients that exists at a point in a step.

    With several micro-batches, all gradients exist at every point. With a single micro-batch, no
    gradients are counted at the point "passes", because activations are freed as gradients are
    added. At the point "first block", all gradients exist except those of the first block."""
    if rank.num_microbatches > 1 or point == "update":
        return 1
    if point == "passes":
        return 0
    missing_parameters = rank.trained_parameters / rank.num_blocks
    if rank.trained_share:
        missing_parameters = rank.parameters_in_blocks / rank.num_blocks
    return 1 - missing_parameters / rank.trained_parameters


def _moved_bytes(sizes: Sizes) -> float:
    """Return the number of bytes per parameter that are read and written to add a gradient to the
    sum of earlier gradients. If the backward pass is split, a GPU adds the product to the fp32 sum
    in the kernel that multiplies: 4 + 4 bytes, instead of the 2 bytes of the product."""
    if sizes.plan.schedule.splits_backward and sizes.plan.machine.num_gpus:
        return 6
    return GRADIENT_SUM_BYTES if sizes.num_microbatches > 1 or sizes.pp > 1 else 0


BLOCK = Mechanism(
    is_used=lambda plan: True,
    gradient_share=gradient_share,
    backward_bytes=backward_bytes,
    block_costs=block_costs,
    moved_bytes=_moved_bytes,
)
