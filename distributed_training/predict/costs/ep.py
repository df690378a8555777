"""Estimate the cost of expert parallelism: experts stay on their ranks, and tokens travel over the
shard group of FSDP. costs/fsdp.py does not gather these experts. This module does not import torch.

Shapes do not depend on what the router chooses, so every rank has buffers for more pairs of tokens
and experts than the mean over ranks (`expert_row_factor`). If a step needs more, it is repeated
with larger buffers, which is not counted."""

import math
from collections.abc import Sequence

from distributed_training.plan.layout import expert_row_factor
from distributed_training.predict.mechanism import (
    Cost,
    Mechanism,
    PassCosts,
    PipelineRank,
    Sizes,
    Timing,
    Traffic,
)


def _row_values(sizes: Sizes) -> tuple[float, float]:
    """Return (values per token in the outputs of the experts' first products, values per token in
    the inputs and outputs of all their products)."""
    products = sizes.kind.expert_products
    first = max((rows * count for rows, _, count in products), default=0)
    return first, sum((rows + columns) * count for rows, columns, count in products)


def _extra_rows(sizes: Sizes) -> float:
    """Return the number of rows in buffers beyond the mean over ranks, as a share of the mean."""
    return expert_row_factor(sizes.config, sizes.shards) - 1


def _sent_rows(sizes: Sizes) -> float:
    """Return the number of rows in the buffers in which each rank sends tokens to their experts, or
    0 if it sends its tokens to all ranks (parallel/experts.py)."""
    *_, per_token = sizes.kind.expert_products[0]
    factor = expert_row_factor(sizes.config, sizes.shards)
    if per_token >= sizes.shards or factor >= sizes.shards:
        return 0
    return sizes.shards * math.ceil(factor * sizes.tokens * per_token / sizes.shards)


def token_traffic(rank: PipelineRank) -> Traffic:
    """Return the traffic over dp_shard: for each mixture and micro-batch, the tokens of all ranks
    are gathered, with the numbers and weights of their experts, and their results are summed, or
    the rows of chosen experts travel to them and back. The same happens to the gradients, except
    for the numbers. Recomputation sends the tokens again."""
    tokens = chosen = sent_rows = 0.0
    for share, sizes in rank.by_kind():
        if products := sizes.kind.expert_products:
            *_, per_token = products[0]
            sent_rows += share * _sent_rows(sizes)
            tokens += share * rank.hidden_bytes
            chosen += share * rank.tokens * per_token
    weights = rank.dtype_bytes * chosen
    times = rank.num_microbatches * rank.num_blocks
    if sent_rows:
        row_bytes = rank.size.hidden_size * rank.dtype_bytes
        # Recomputation ends after the results have come back, for the places of their tokens.
        sent = (1 + rank.recomputed_share) * (2 * row_bytes + rank.dtype_bytes + 8)
        sent += 2 * row_bytes + rank.dtype_bytes
        return {("dp_shard", "all_to_all"): round(times * sent_rows * sent)}
    times *= rank.shards
    gathered = tokens + (1 + rank.recomputed_share) * (tokens + weights + 8 * chosen)
    return {
        ("dp_shard", "all_gather"): round(times * gathered),
        ("dp_shard", "reduce_scatter"): round(times * (2 * tokens + weights)),
    }


def exchange_costs(timing: Timing) -> PassCosts:
    """Return the costs of exchanging a block's tokens, and of moving the rows of other ranks'
    experts, which element-wise operations do not skip. Tokens travel with their experts' numbers
    and weights."""
    if not timing.kind.expert_products:
        return PassCosts()
    if rows := _sent_rows(timing):
        num_bytes = 2 * rows * timing.size.hidden_size * timing.dtype_bytes
        network_s = timing.collective_s("dp_shard", "all_to_all", num_bytes, 4)
    else:
        num_bytes = timing.shards * timing.hidden_bytes
        network_s = timing.collective_s("dp_shard", "all_gather", num_bytes, 3)
        network_s += timing.collective_s("dp_shard", "reduce_scatter", num_bytes, 1)
    _, row_values = _row_values(timing)
    moved = timing.memory_cost(2 * _extra_rows(timing) * row_values * timing.value_bytes)
    cost = Cost(network_s=network_s) + moved
    return PassCosts(forward=cost, inputs=cost + moved)


def recomputed_costs(timing: Timing, forward: Cost) -> Sequence[Cost]:
    """Return the cost of sending the tokens again under selective checkpointing."""
    is_selective = timing.config.activation_checkpointing == "selective"
    if not is_selective or not timing.kind.expert_products:
        return ()
    return ((1 if _sent_rows(timing) else 0.5) * exchange_costs(timing).forward,)


def kept_bytes(rank: PipelineRank, recomputed: float) -> float:
    """Return the size in bytes of what a block keeps for the tokens of other ranks: the outputs of
    the experts' first products and, without recomputation, the tokens."""
    first, _ = _row_values(rank)
    if not first:
        return 0
    is_selective = rank.config.activation_checkpointing == "selective"
    share = 1 if is_selective else 1 - recomputed
    tokens = (1 - recomputed) * rank.size.hidden_size
    return _extra_rows(rank) * rank.value_bytes * (share * first + tokens)


def gradient_bytes(rank: PipelineRank, recomputed: float) -> float:
    """Return the size in bytes of the gradients of other ranks' rows at the peak of a block's
    backward pass, and of what is computed again before."""
    first, row_values = _row_values(rank)
    values = row_values + (first if recomputed == 1 else 0)
    return _extra_rows(rank) * rank.value_bytes * values


EP = Mechanism(
    is_used=lambda plan: plan.config.expert_parallel,
    activation_bytes=kept_bytes,
    backward_bytes=gradient_bytes,
    layer_traffic=token_traffic,
    block_costs=exchange_costs,
    recomputed_costs=recomputed_costs,
    num_launches=lambda rank: 4,
)
