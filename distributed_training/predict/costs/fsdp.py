"""Estimate the cost of PyTorch's FSDP, which shards state over dp_shard and replicates the shards
over dp_replicate. This module does not import torch."""

from collections import Counter

from distributed_training.predict.costs.lora import base_bytes
from distributed_training.predict.mechanism import Bytes, Mechanism, Moment, Parts, Place


def exchange(at: Place) -> Bytes:
    """Return the traffic for gathering each block before its forward and backward passes in every
    micro-batch, and for reduce-scattering its gradients. In a pipeline, these collectives run once
    per step, before and after the pipeline's passes."""
    traffic: Bytes = Counter()
    if at.shards > 1:
        around = at.width * at.around
        blocks = base_bytes(at) - around + at.width * at.adapters
        traffic["dp_shard", "all_gather"] = at.rounds * ((1 if at.pp > 1 else 2) * blocks + around)
        traffic["dp_shard", "reduce_scatter"] = at.rounds * 4 * at.learning
    if at.mesh["dp_replicate"] > 1:  # between replicas, once per step
        traffic["dp_replicate", "all_reduce"] = 4 * at.learning // at.shards
    return traffic


def held(at: Place, moment: Moment, state: Parts) -> Parts:
    """Return the sizes in bytes of gathered parameters, and of unsharded fp32 gradients before
    their reduce-scatter. Parameters outside the blocks stay gathered. Among the blocks, only the
    current and the prefetched ones are gathered."""
    if at.pp > 1:  # see costs/pp.py
        return {}
    if moment == "update" and at.trained:
        # Gradients of the root module in fp32, and of the output rows in the compute dtype
        return {"buffers": 4 * at.around + at.width * at.embedding}
    num_blocks = max(1, at.num_blocks)
    base = (base_bytes(at) - at.width * at.around) / num_blocks
    adapters = at.width * at.adapters / num_blocks
    blocks = (1 + at.config.fsdp_prefetch) * (base + adapters)
    learning = at.in_blocks if at.trained else at.learning
    return {"copies": at.width * at.around + blocks, "buffers": 4 * (learning / num_blocks)}


def _moved(at: Place) -> float:
    """Return the number of bytes per parameter that are read and written in copies to and from
    buffers. Parameters are copied out of a buffer twice, and gradients are copied once as fp32."""
    return 4 * at.width + 4 + at.width if at.pp == 1 else 0


FSDP = Mechanism(
    used=lambda plan: plan.uses_fsdp,
    held=held,
    exchange=exchange,
    moved=_moved,
    launches=lambda at: 1,
)
