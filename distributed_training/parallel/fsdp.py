"""FSDP2: parameters, gradients and optimizer state divided over the data-parallel processes."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from distributed_training.model import GPT2
from distributed_training.topology import Topology


def apply_fsdp(model: GPT2, topology: Topology, compute_dtype: torch.dtype | None) -> None:
    """Shard each block, then the rest, in place, over all ranks.

    Forward all-gathers a block's parameters (in `compute_dtype`) and drops them after use;
    backward gathers them again and reduce-scatters gradients in fp32. The root holds the tied
    embedding, needed first and last, so it stays gathered between forward and backward.
    `compute_dtype` None means fp32 throughout.
    """
    sizes = {"dp_replicate": topology.dp_replicate, "dp_shard": topology.dp_shard}
    if topology.dp_replicate == 1:
        del sizes["dp_replicate"]  # with it, FSDP2 shards within and all-reduces across (HSDP)
    mesh = init_device_mesh(
        topology.device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)
    )
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
