"""Estimate the cost of context parallelism, which splits the tokens of each sample over the ranks
of the cp axis. This module does not import torch."""

import math
from collections.abc import Sequence

from distributed_training.predict.mechanism import (
    Cost,
    Mechanism,
    PassCosts,
    PipelineRank,
    Sizes,
    Timing,
    Traffic,
)


def exchanged_values(sizes: Sizes) -> tuple[float, float]:
    """Return the numbers of values per token in (q, k and v, attention's output). If cp does not
    divide the number of key/value heads, each of these heads is sent several times."""
    kv_heads = sizes.size.num_kv_heads or sizes.size.num_heads
    return _qkv_values(sizes, math.lcm(kv_heads, sizes.cp)), sizes.kind.attention_width


def _qkv_values(sizes: Sizes, kv_heads: int) -> float:
    """Return the number of values per token in q, k and v with so many key/value heads."""
    width = sizes.kind.attention_width
    return width + 2 * width / sizes.size.num_heads * kv_heads


def cp_traffic(rank: PipelineRank) -> Traffic:
    """Return the traffic over the cp axis: for each block and pass, an all-to-all before attention
    and one after it."""
    num_passes = 2 + rank.recomputed_share
    per_block = sum(share * sum(exchanged_values(sizes)) for share, sizes in rank.by_kind())
    values = num_passes * rank.num_microbatches * rank.num_blocks * per_block
    return {("cp", "all_to_all"): int(values * rank.value_bytes)}


def exchange_costs(timing: Timing) -> PassCosts:
    """Return the costs of a block's all-to-alls in each pass. Before and after each of them, the
    values are copied."""
    num_bytes = sum(exchanged_values(timing)) * timing.value_bytes
    seconds = timing.collective_s("cp", "all_to_all", num_bytes, 2)
    cost = Cost(network_s=seconds) + timing.memory_cost(2 * num_bytes)
    return PassCosts(forward=cost, inputs=cost)


def recomputed_costs(timing: Timing, forward: Cost) -> Sequence[Cost]:
    """Return the cost of repeating the all-to-alls and the product with attention's output under
    selective checkpointing. With full checkpointing, the cost of the whole forward pass includes
    them."""
    if timing.config.activation_checkpointing != "selective":
        return ()
    product = timing.gemm_cost(timing.tokens, timing.kind.attention_width, timing.size.hidden_size)
    return exchange_costs(timing).forward, product


def exchanged_bytes(rank: PipelineRank) -> float:
    """Return the number of bytes that a block's backward pass needs in addition to those of
    costs/block.py: attention's output before the all-to-all, and repeated key/value heads."""
    qkv, output = exchanged_values(rank)
    kv_heads = rank.size.num_kv_heads or rank.size.num_heads
    return rank.value_bytes * (output + qkv - _qkv_values(rank, kv_heads))


def kept_bytes(rank: PipelineRank, recomputed: float) -> float:
    """Return by how many bytes cp changes what a block keeps. Selective checkpointing does not keep
    the product with attention's output."""
    num_bytes = (1 - recomputed) * exchanged_bytes(rank)
    if rank.config.activation_checkpointing == "selective":
        num_bytes -= recomputed * rank.hidden_bytes
    return num_bytes


CP = Mechanism(
    is_used=lambda plan: plan.mesh["cp"] > 1,
    activation_bytes=kept_bytes,
    backward_bytes=lambda rank, recomputed: exchanged_bytes(rank) if recomputed == 1 else 0,
    layer_traffic=cp_traffic,
    block_costs=exchange_costs,
    recomputed_costs=recomputed_costs,
    num_launches=lambda rank: 1,
)
