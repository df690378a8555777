"""Data parallelism: every process holds everything and averages gradients."""

from __future__ import annotations

import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

from distributed_training.plan.topology import Topology


def apply_ddp(model: nn.Module, topology: Topology) -> nn.Module:
    """Wrap `model` so that backward all-reduces gradients (mean over all ranks, in fp32 buckets,
    overlapping the rest of backward). One process has nobody to average with: it stays bare.
    """
    if topology.world_size == 1:
        return model
    return DistributedDataParallel(
        model,
        device_ids=[topology.local_rank] if topology.device_type == "cuda" else None,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
    )
