"""Estimate the cost of activation checkpointing. A block keeps fewer activations, and the backward
pass recomputes the others. This module does not import torch."""

import math
from collections.abc import Sequence

from distributed_training.predict.costs import block, lora, tp
from distributed_training.predict.mechanism import Cost, Mechanism, PipelineRank, Timing


def full_recompute_costs(timing: Timing, forward: Cost) -> Sequence[Cost]:
    """Return the cost of repeating the forward pass. The last matrix multiplication is repeated
    only in uncompiled blocks with adapters. Compiled blocks with adapters repeat only half of the
    adapters' computation."""
    rows, columns = block.matrix_shapes(timing)[-1]
    last_gemm = timing.gemm_cost(timing.tokens, columns, rows)
    if timing.config.compile:
        return forward, -(
            last_gemm + (0 if timing.trained_share else lora.adapter_costs(timing)[0] / 2)
        )
    return (forward, -last_gemm) if timing.trained_share else (forward,)


def selective_recompute_costs(timing: Timing, forward: Cost) -> Sequence[Cost]:
    """Return the cost of repeating the element-wise operations and half of the collectives over
    tp."""
    return (block.elementwise_costs(timing)[0] + 0.5 * tp.block_exchange_cost(timing),)


def boundary_bytes(rank: PipelineRank) -> float:
    """Return the size in bytes of a block's input, or of the gradient of its output."""
    return rank.hidden_bytes * rank.hidden_share


def inputs_on_host(rank: PipelineRank) -> float:
    """Return the size in bytes of the block inputs that wait in host memory. In a pipeline, this is
    the most that any schedule needs. torch rounds the size of a page-locked buffer up to a power of
    two."""
    if rank.config.activation_checkpointing != "offload":
        return 0
    num_inputs = rank.num_blocks * (rank.num_microbatches if rank.pp > 1 else 1)
    return num_inputs * 2 ** math.ceil(math.log2(boundary_bytes(rank)))


def selective_activation_bytes(rank: PipelineRank) -> float:
    """Return the size in bytes of the tensors that selective checkpointing keeps for a block: the
    input, the outputs of matrix multiplications, and the output of attention. The output of the
    last matrix multiplication counts only if the block is not compiled."""
    values = (2 if rank.config.compile else 3) * rank.hidden_share
    values += rank.split_values("selective") / rank.tp
    return rank.hidden_bytes * values + block.statistics_bytes(rank)


# Without recomputation, the incoming gradient needs memory in addition to the activations that the
# block keeps. In a recomputed block, the gradient reuses the memory of the block's input.
NONE = Mechanism(
    is_used=lambda plan: plan.config.activation_checkpointing == "none",
    activation_bytes=block.activation_bytes,
    backward_bytes=boundary_bytes,
)
FULL = Mechanism(
    is_used=lambda plan: plan.config.activation_checkpointing == "full",
    activation_bytes=boundary_bytes,
    backward_bytes=block.activation_bytes,
    recomputed_costs=full_recompute_costs,
)
OFFLOAD = Mechanism(
    is_used=lambda plan: plan.config.activation_checkpointing == "offload",
    # One input leaves the GPU, and one returns, while a block is computed.
    backward_bytes=lambda rank: block.activation_bytes(rank) + 2 * boundary_bytes(rank),
    recomputed_costs=full_recompute_costs,
)
SELECTIVE = Mechanism(
    is_used=lambda plan: plan.config.activation_checkpointing == "selective",
    activation_bytes=selective_activation_bytes,
    backward_bytes=block.activation_bytes,
    recomputed_costs=selective_recompute_costs,
)
