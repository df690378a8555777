"""Estimate the cost of activation checkpointing. A block keeps fewer activations, and the backward
pass recomputes the others. This module does not import torch."""

import math
from collections.abc import Sequence

from distributed_training.predict.costs import block, lora, tp
from distributed_training.predict.mechanism import (
    Cost,
    Mechanism,
    PipelineRank,
    Sizes,
    Timing,
    page_locked_bytes,
)
from distributed_training.predict.rates import FITTED


def full_recompute_costs(timing: Timing, forward: Cost) -> Sequence[Cost]:
    """Return the cost of repeating the forward pass. The last matrix multiplication is repeated
    only in uncompiled blocks with adapters. Compiled blocks with adapters repeat only half of the
    adapters' computation."""
    num_tokens, rows, columns = block.matrix_products(timing)[-1]
    last_gemm = timing.gemm_cost(num_tokens, columns, rows)
    if timing.trained_share:
        return forward, -1 * last_gemm
    if timing.config.compile:
        return forward, -1 * (last_gemm + 0.5 * lora.adapter_costs(timing).forward)
    return (forward,)


def selective_recompute_costs(timing: Timing, forward: Cost) -> Sequence[Cost]:
    """Return the cost of repeating the element-wise operations and half of the collectives over
    tp."""
    return (block.elementwise_costs(timing)[0] + 0.5 * tp.block_exchange_costs(timing).forward,)


def attention_offload_costs(timing: Timing, forward: Cost) -> Sequence[Cost]:
    """Return the cost of repeating what selective checkpointing repeats and the MLP's products but
    its last one. The MLP has a block's largest matrices. Add the time by which copies to and from
    the host exceed the forward pass, and the backward pass, which takes twice as long."""
    (cheap,) = selective_recompute_costs(timing, forward)
    values = [math.prod(shape) for shape in block.matrix_shapes(timing)]
    values += map(math.prod, timing.kind.expert_products)
    repeated = max(1, values.count(max(values)) - 1) * max(values)
    products = forward - block.attention_cost(timing) - cheap
    pcie = FITTED.host_copy_bytes_per_s
    is_new = timing.plan.machine.compute_capability >= (9, 0)
    rate = min(timing.rates.link_bytes_per_s, pcie.pcie5 if is_new else pcie.pcie4)
    copy_s = sum(waiting_bytes(timing)) / rate
    forward_s = forward.total_s
    wait_s = max(0, copy_s - forward_s) + max(0, copy_s - 2 * forward_s)
    return cheap, repeated / sum(values) * products, Cost(network_s=wait_s)


def boundary_bytes(sizes: Sizes) -> float:
    """Return the size in bytes of a block's input, or of the gradient of its output."""
    return sizes.hidden_bytes * sizes.hidden_share


def waiting_bytes(sizes: Sizes) -> Sequence[float]:
    """Return the sizes in bytes of the tensors of a block that wait in host memory: its input and,
    with `offload-attention`, the outputs of attention, of the matrices before it and of the matrix
    after it."""
    if sizes.config.activation_checkpointing == "offload":
        return (boundary_bytes(sizes),)
    both = sizes.hidden_bytes * sizes.split_values("offload-attention") / sizes.tp
    attention = sizes.value_bytes * sizes.kind.attention_width / sizes.tp
    parts = (both - attention, attention)
    return 2 * (boundary_bytes(sizes),) + tuple(part for part in parts if part > 0)


def bytes_on_host(rank: PipelineRank) -> float:
    """Return the size in bytes of the buffers in which tensors wait in host memory. In a pipeline,
    this is the most that any schedule needs."""
    if not rank.config.offloads_activations:
        return 0
    return (
        rank.recomputed_share
        * rank.num_blocks
        * (rank.num_microbatches if rank.pp > 1 else 1)
        * sum(map(page_locked_bytes, waiting_bytes(rank)))
    )


def selective_activation_bytes(rank: PipelineRank, recomputed: float) -> float:
    """Return the size in bytes of the tensors that selective checkpointing keeps for a block: the
    input, the outputs of matrix multiplications, and the output of attention. The output of the
    last matrix multiplication counts only if the block is not compiled."""
    values = (2 if rank.config.compile else 3) * rank.hidden_share
    values += rank.split_values("selective") / rank.tp
    return recomputed * (rank.hidden_bytes * values + block.statistics_bytes(rank))


def recomputed_bytes(rank: PipelineRank, recomputed: float) -> float:
    """Return the size in bytes of the activations that the first backward pass recomputes. This is
    the last block's pass, and the last block recomputes only if all blocks do. Otherwise, its
    activations are freed before other blocks run backward."""
    return block.activation_bytes(rank) if recomputed == 1 else 0


# Without recomputation, the incoming gradient needs memory in addition to the activations that the
# block keeps. In a recomputed block, the gradient reuses the memory of the block's input.
NONE = Mechanism(
    is_used=lambda plan: True,
    activation_bytes=lambda rank, recomputed: (1 - recomputed) * block.activation_bytes(rank),
    backward_bytes=lambda rank, recomputed: 0 if recomputed == 1 else boundary_bytes(rank),
)
FULL = Mechanism(
    is_used=lambda plan: plan.config.activation_checkpointing == "full",
    activation_bytes=lambda rank, recomputed: recomputed * boundary_bytes(rank),
    backward_bytes=recomputed_bytes,
    recomputed_costs=full_recompute_costs,
)
OFFLOAD = Mechanism(
    is_used=lambda plan: plan.config.activation_checkpointing == "offload",
    # One input leaves the GPU, and one returns, while a block is computed.
    backward_bytes=lambda rank, recomputed: (
        recomputed_bytes(rank, recomputed) + 2 * boundary_bytes(rank)
    ),
    recomputed_costs=full_recompute_costs,
)
OFFLOAD_ATTENTION = Mechanism(
    is_used=lambda plan: plan.config.activation_checkpointing == "offload-attention",
    activation_bytes=lambda rank, recomputed: recomputed * block.statistics_bytes(rank),
    backward_bytes=lambda rank, recomputed: (
        recomputed_bytes(rank, recomputed) + sum(waiting_bytes(rank))
    ),
    recomputed_costs=attention_offload_costs,
)
SELECTIVE = Mechanism(
    is_used=lambda plan: plan.config.activation_checkpointing == "selective",
    activation_bytes=selective_activation_bytes,
    backward_bytes=recomputed_bytes,
    recomputed_costs=selective_recompute_costs,
)
