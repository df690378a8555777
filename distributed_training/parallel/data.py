"""Data parallelism: every process holds everything (DDP), or a shard of everything (FSDP2)."""

from __future__ import annotations

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from distributed_training.models.decoder import Decoder
from distributed_training.plan.topology import Topology


def apply_ddp(model: nn.Module, topology: Topology) -> nn.Module:
    """Wrap `model` so that backward all-reduces gradients: their mean over all ranks, in fp32
    buckets, overlapping the rest of backward. One process has nobody to average with."""
    if topology.world_size == 1:
        return model
    devices = [topology.local_rank] if topology.device_type == "cuda" else None
    return DistributedDataParallel(
        model, device_ids=devices, gradient_as_bucket_view=True, broadcast_buffers=False
    )


def apply_fsdp(
    model: Decoder, mesh: DeviceMesh, dtype: torch.dtype | None, *, keep_gathered: bool = False
) -> None:
    """Shard each block, then the rest, in place, over one axis, or two: copies of shards (HSDP).

    Forward all-gathers a block's parameters (in `dtype`; None: fp32) and drops them after
    use; backward gathers them again and reduce-scatters gradients in fp32 (and all-reduces the
    shards between copies). The root holds the tied embedding, needed first and last, so it stays
    gathered; with `keep_gathered` so does every block, for pipeline stages, which run many times.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep_gathered)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
