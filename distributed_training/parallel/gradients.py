"""Compute sums and norms of gradients over ranks, and define a DDP communication hook that sends
gradients in bf16.

DDP checks the hook's annotations, so the annotations must not be strings."""

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.tensor import DTensor

from distributed_training.models.private import local_part
from distributed_training.parallel.mesh import Topology
from distributed_training.parallel.private import foreach_mul, foreach_norm


@torch.no_grad()
def all_reduce_sum(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Sum each tensor over `group`, in place with one all-reduce."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    totals = flat.split([tensor.numel() for tensor in tensors])
    for tensor, total in zip(tensors, totals, strict=True):
        tensor.copy_(total.view(tensor.shape))


@torch.no_grad()
def global_norm(
    parameters: list[nn.Parameter], topology: Topology, duplicate_params: Collection[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (2-norm of all gradients of the model, 2-norm of this rank's shard of each gradient).
    The former is an fp32 scalar that is equal on all ranks. The latter has one value per parameter.

    Each rank divides the squared norm of each shard by the number of ranks in its stage that hold
    the shard, and sums the quotients. Parameters in `duplicate_params` are left out, because
    another stage counts them. The sum over ranks needs one all-reduce of a scalar, unless every
    rank has all gradients."""
    gradients = [local_part(parameter.grad) for parameter in parameters]
    norms = foreach_norm(gradients, dtype=torch.float32)
    param_grad_norms = torch.stack(norms)
    if topology.world_size == topology.dp_replicate:
        return torch.linalg.vector_norm(param_grad_norms), param_grad_norms
    ranks_per_stage = topology.world_size // topology.pp
    shares = []
    for parameter in parameters:
        num_shards = 0 if parameter in duplicate_params else _num_shards(parameter.grad)
        shares.append(num_shards / ranks_per_stage)
    total = torch.stack(foreach_mul(foreach_mul(norms, norms), shares)).sum()
    dist.all_reduce(total)
    return total.sqrt(), param_grad_norms


def _num_shards(gradient: Any) -> int:
    """Return the number of distinct shards of a gradient within a stage."""
    if not isinstance(gradient, DTensor):
        return 1
    sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())


def bf16_hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Call torch's bf16_compress_hook under another name, because DDP on CPUs rejects a hook with
    the original name."""
    return bf16_compress_hook(state, bucket)
