"""Estimate the cost of tensor parallelism, which shards each layer over the ranks of the tp axis.
This module does not import torch."""

from distributed_training.predict.mechanism import (
    Cost,
    Mechanism,
    PassCosts,
    PipelineRank,
    Timing,
    Traffic,
)
from distributed_training.predict.rates import FITTED


def tp_traffic(rank: PipelineRank) -> Traffic:
    """Return the traffic over the tp axis. With sequence parallelism, the forward and backward
    passes of a block each run two all-gathers and two reduce-scatters. Without sequence
    parallelism, each pass runs two all-reduces. The embedding, the output layer and the loss
    require additional collectives. Once per step, the gradients of some replicated parameters are
    summed over tp. `rank.tp_partial_parameters` is the number of these parameters."""
    num_microbatches = rank.num_microbatches
    exchanged_bytes = num_microbatches * 4 * rank.num_blocks * rank.hidden_bytes
    reduced_bytes = rank.weight_bytes * rank.tp_partial_parameters // rank.shards
    gathered_bytes = 0
    if rank.has_last_stage:
        exchanged_bytes += num_microbatches * rank.hidden_bytes
        # Two fp32 numbers per token and process
        gathered_bytes += num_microbatches * 8 * rank.tokens * rank.tp
    if rank.has_first_stage:
        rounds = rank.plan.num_processes > rank.tp  # FSDP rounds parameters
        embedding_bytes_per_value = rank.dtype_bytes if rounds else rank.weight_bytes
        exchanged_bytes += (
            rank.trained_share
            * num_microbatches
            * rank.tokens
            * rank.size.hidden_size
            * embedding_bytes_per_value
        )
    # Recomputation stops before the last exchange of the forward pass, whose result is unused.
    recomputed_bytes = (
        rank.recomputed_share * num_microbatches * rank.num_blocks * rank.hidden_bytes
    )
    # With "selective", the sum is kept, and compiled blocks do not repeat it.
    keeps_sum = rank.config.activation_checkpointing == "selective" and rank.config.compile
    recomputed_sum_bytes = 0 if keeps_sum else recomputed_bytes
    return {
        ("tp", "all_reduce"): reduced_bytes,
        ("tp", "all_gather"): exchanged_bytes + 2 * recomputed_bytes + gathered_bytes,
        ("tp", "reduce_scatter"): exchanged_bytes + recomputed_sum_bytes,
    }


def block_exchange_costs(timing: Timing) -> PassCosts:
    """Return the costs of a block's collectives over tp: in the forward pass and in the backward
    pass, two all-gathers and two reduce-scatters."""
    if timing.tp == 1:
        return PassCosts()
    seconds = timing.collective_s("tp", "all_gather", 4 * timing.hidden_bytes, 4)
    if timing.config.async_tp:
        seconds *= 1 - FITTED.async_tp_share
    cost = Cost(network_s=seconds)
    return PassCosts(forward=cost, inputs=cost)


TP = Mechanism(
    is_used=lambda plan: plan.mesh["tp"] > 1,
    layer_traffic=tp_traffic,
    block_costs=block_exchange_costs,
    num_launches=lambda rank: 1,
)
