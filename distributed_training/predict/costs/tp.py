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
    """Return the traffic over the tp axis. The forward and backward passes of a block each run an
    all-gather and a reduce-scatter for attention, and for the MLP, if tp shards them. The
    embedding, the output layer and the loss require additional collectives. Once per step, the
    gradients of the replicated parameters are summed over tp. `rank.tp_partial_parameters` is the
    number of these parameters."""
    num_microbatches = rank.num_microbatches
    num_sums = rank.num_blocks * sum(
        share * sizes.kind.num_regions for share, sizes in rank.by_kind()
    )
    exchanged_bytes = num_microbatches * 2 * num_sums * rank.hidden_bytes
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
    recomputed_bytes = rank.recomputed_share * num_microbatches * rank.hidden_bytes
    # With "selective", the sum is kept, and compiled blocks do not repeat it.
    keeps_sum = rank.config.activation_checkpointing == "selective" and rank.config.compile
    num_repeated_sums = 0 if keeps_sum else num_sums - rank.num_blocks
    return {
        ("tp", "all_reduce"): reduced_bytes,
        ("tp", "all_gather"): exchanged_bytes + num_sums * recomputed_bytes + gathered_bytes,
        ("tp", "reduce_scatter"): exchanged_bytes + num_repeated_sums * recomputed_bytes,
    }


def block_exchange_costs(timing: Timing) -> PassCosts:
    """Return the costs of a block's collectives over tp: in the forward pass and in the backward
    pass, an all-gather and a reduce-scatter for each region that tp shards."""
    if timing.tp == 1:
        return PassCosts()
    num_exchanges = 2 * timing.kind.num_regions
    exchanged_bytes = num_exchanges * timing.hidden_bytes
    seconds = timing.collective_s("tp", "all_gather", exchanged_bytes, num_exchanges)
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
