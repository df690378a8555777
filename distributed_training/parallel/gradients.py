"""Gradients that may be spread over processes: their norm, each counted once, and their sums."""

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from distributed_training.parallel.mesh import Topology
from distributed_training.parallel.private import foreach_mul, foreach_norm


def local_part(tensor: Any) -> torch.Tensor:
    """This process's part of a DTensor, sharing its memory; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def match_layouts(parameters: list[Any]) -> None:
    """Bring each gradient to its parameter's layout."""
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


@torch.no_grad()
def add_up(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None, divisor: int = 1
) -> None:
    """Replace each tensor by its sum over `group` divided by `divisor`, in one all-reduce."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    flat /= divisor
    for tensor, total in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(total.view(tensor.shape))


def average(tensors: Sequence[torch.Tensor]) -> None:
    """Replace each tensor by its mean over all processes, in one all-reduce."""
    add_up(tensors, divisor=dist.get_world_size())


@torch.no_grad()
def global_norm(
    parameters: list[nn.Parameter], topology: Topology, counted_elsewhere: Collection[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """2-norm of all gradients of the model, fp32 scalar, the same on every rank; and the norms of
    what this rank holds of each parameter's, [number of parameters], for whoever looks for a fault.
    Every rank adds the squares of what it holds, divided by the number of ranks of its stage that
    hold the same; one all-reduce of a scalar, unless all ranks hold everything."""
    norms = foreach_norm([local_part(parameter.grad) for parameter in parameters])
    each = torch.stack(norms)
    if topology.world_size == topology.dp_replicate:
        return torch.linalg.vector_norm(each), each
    per_stage = topology.world_size // topology.pp
    shares = [
        0.0 if parameter in counted_elsewhere else _num_parts(parameter.grad) / per_stage
        for parameter in parameters
    ]
    total = torch.stack(foreach_mul(foreach_mul(norms, norms), shares)).sum()
    dist.all_reduce(total)
    return total.sqrt(), each


def _num_parts(gradient: Any) -> int:
    """How many ranks of a stage hold different ones."""
    if not isinstance(gradient, DTensor):
        return 1
    sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return math.prod(size for size, place in sizes if not place.is_replicate())
