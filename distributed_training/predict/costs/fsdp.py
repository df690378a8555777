"""Estimate the cost of PyTorch's FSDP, which shards state over dp_shard and replicates the shards
over dp_replicate. This module does not import torch."""

from distributed_training.predict.costs.lora import base_bytes, resting_bytes
from distributed_training.predict.mechanism import (
    ComponentBytes,
    Mechanism,
    PipelineRank,
    Sizes,
    StepPoint,
    Traffic,
)


def shard_traffic(rank: PipelineRank) -> Traffic:
    """Return the traffic for gathering each block before its forward and backward passes in every
    micro-batch, and for reduce-scattering its gradients. In a pipeline, these collectives run once
    per step, before and after the pipeline's passes."""
    traffic: Traffic = {}
    if rank.shards > 1:
        outer_bytes = rank.dtype_bytes * rank.parameters_outside_blocks
        times = rank.exchanges_per_step * (1 if rank.pp > 1 else 2)
        frozen = "copy" if rank.plan.shares_frozen_shards else "all_gather"
        outer_times = 0 if rank.plan.keeps_outer_weights_gathered else rank.exchanges_per_step
        adapters = rank.adapter_parameters - rank.resting_adapters
        traffic["dp_shard", "all_gather"] = (
            outer_times * outer_bytes + times * rank.dtype_bytes * adapters
        )
        traffic["dp_shard", frozen] = traffic.get(("dp_shard", frozen), 0) + round(
            times * (base_bytes(rank) - outer_bytes - resting_bytes(rank))
        )
        traffic["dp_shard", "reduce_scatter"] = (
            rank.exchanges_per_step * rank.weight_bytes * _num_reduced(rank)
        )
    if rank.mesh["dp_replicate"] > 1:  # between replicas, once per step
        traffic["dp_replicate", "all_reduce"] = (
            rank.weight_bytes * rank.trained_parameters // rank.shards
        )
    return traffic


def _num_reduced(rank: PipelineRank) -> int:
    """Return the number of parameters whose gradients are summed over dp_shard."""
    resting = rank.resting_parameters if rank.trained_share else rank.resting_adapters
    return rank.trained_parameters - resting


def gathered_bytes(rank: PipelineRank, point: StepPoint) -> ComponentBytes:
    """Return the sizes in bytes of gathered parameters, and of unsharded gradients before their
    reduce-scatter. Parameters outside the blocks stay gathered. Only the current block and the
    next block, which FSDP prefetches, are gathered."""
    if rank.pp > 1:  # see costs/pp.py
        return {}
    if point == "update" and rank.trained_share:
        # Gradients of the root module in the dtype of the weights, and of the output layer's weight
        # in the compute dtype
        return {
            "buffers": rank.weight_bytes * rank.parameters_outside_blocks
            + rank.dtype_bytes * rank.embedding_parameters
        }
    outer_bytes = rank.dtype_bytes * rank.parameters_outside_blocks
    base_per_block = (base_bytes(rank) - outer_bytes - resting_bytes(rank)) / rank.num_blocks
    adapters = rank.adapter_parameters - rank.resting_adapters
    adapters_per_block = rank.dtype_bytes * adapters / rank.num_blocks
    # The largest blocks may be next to each other.
    counts = [kind.parameters for kind in rank.size.kinds]
    if rank.config.expert_parallel:
        counts = [kind.parameters - kind.stack_values for kind in rank.size.kinds]
    num_gathered = rank.size.block_parameters - rank.resting_parameters
    relative_size = max(counts) / (num_gathered / rank.size.num_layers)
    gathered_blocks = 2 * relative_size * (base_per_block + adapters_per_block)
    block_parameters = _num_reduced(rank)
    if rank.trained_share:
        block_parameters -= rank.parameters_outside_blocks
    return {
        "copies": outer_bytes + gathered_blocks,
        "buffers": rank.weight_bytes * relative_size * (block_parameters / rank.num_blocks),
    }


def _moved_bytes(sizes: Sizes) -> float:
    """Return the number of bytes per parameter that are read and written when values are copied to
    and from buffers. Parameters are copied out of a buffer twice, and gradients are copied once in
    the dtype of the weights."""
    return 5 * sizes.dtype_bytes + sizes.weight_bytes if sizes.pp == 1 else 0


FSDP = Mechanism(
    is_used=lambda plan: plan.uses_fsdp,
    additional_bytes=gathered_bytes,
    data_parallel_traffic=shard_traffic,
    moved_bytes=_moved_bytes,
    num_launches=lambda rank: 1,
)
