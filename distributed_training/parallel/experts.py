"""Implement expert parallelism: a mixture's experts stay on their ranks, and tokens travel to them.

FSDP shards a stack of E matrices along its first dimension, so that each of n ranks has E / n whole
experts. Expert parallelism leaves these shards where they are. The ranks gather the tokens of all
ranks, each computes its own experts, and a reduce-scatter sums the results. All shapes are static,
and no token is dropped. Checkpoints and the optimizer see the same shards as under FSDP."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from distributed_training.models.decoder import EXPERT_ENDS
from distributed_training.models.hub.experts import STACKS
from distributed_training.models.private import store_parameter
from distributed_training.parallel.gradients import all_reduce_sum
from distributed_training.parallel.mesh import local_part
from distributed_training.parallel.private import foreach_mul_, group_of_name


class TokenExchange:
    """Exchange of tokens between the ranks that share a mixture's experts. models/hub/experts.py
    calls this object if it is an attribute of the mixture."""

    def __init__(self, group: dist.ProcessGroup, num_experts: int) -> None:
        self.group_name = group.group_name
        self.num_experts = num_experts // group.size()  # on each rank
        self.first = group.rank() * self.num_experts  # this rank's first expert

    def own_experts(self, chosen: torch.Tensor) -> torch.Tensor:
        """Return the indices of experts among this rank's, or `num_experts` for other ranks'."""
        own = chosen - self.first
        return torch.where((own >= 0) & (own < self.num_experts), own, self.num_experts)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of all n ranks, [N, ..] -> [n N, ..]."""
        return _gather(x, self.group_name)

    def scatter_sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks of the rows of this rank's tokens, [n N, ..] -> [N, ..]."""
        return _scatter_sum(x, self.group_name)


# As in context.py, full checkpointing recomputes an operation.
@torch.library.custom_op("distributed_training::gather_tokens", mutates_args=())
def _gather(x: torch.Tensor, group: str) -> torch.Tensor:
    ranks = group_of_name(group)
    gathered = x.new_empty(ranks.size() * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(gathered, x.contiguous(), group=ranks)
    return gathered


@torch.library.custom_op("distributed_training::sum_tokens", mutates_args=())
def _scatter_sum(x: torch.Tensor, group: str) -> torch.Tensor:
    ranks = group_of_name(group)
    total = x.new_empty(len(x) // ranks.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(total, x.contiguous(), group=ranks)
    return total


@_gather.register_fake
def _(x, group):  # type: ignore[no-untyped-def]
    return x.new_empty(group_of_name(group).size() * len(x), *x.shape[1:])


@_scatter_sum.register_fake
def _(x, group):  # type: ignore[no-untyped-def]
    return x.new_empty(len(x) // group_of_name(group).size(), *x.shape[1:])


def _keep_group(ctx: Any, inputs: tuple[torch.Tensor, str], output: torch.Tensor) -> None:
    ctx.group = inputs[1]


def _scatter_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return _scatter_sum(gradient, ctx.group), None


def _gather_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return _gather(gradient, ctx.group), None


_gather.register_autograd(_scatter_gradient, setup_context=_keep_group)
_scatter_sum.register_autograd(_gather_gradient, setup_context=_keep_group)


def find_experts(model: nn.Module) -> Iterator[tuple[Any, str, nn.Parameter]]:
    """Yield each parameter with one row per expert, and its module and name in it: stacks, their
    biases, adapters and quantization scales."""
    for mixture in model.modules():
        if hasattr(mixture, EXPERT_ENDS):
            for path, parameter in list(mixture.named_parameters()):
                if path.startswith(tuple(STACKS)):
                    owner, _, name = path.rpartition(".")
                    yield mixture.get_submodule(owner), name, parameter


def shard_experts(model: nn.Module, mesh: DeviceMesh) -> set[nn.Parameter]:
    """Give each rank along the last axis of `mesh` its own experts of every mixture, in place.
    Return the sharded parameters, which FSDP must ignore."""
    group = mesh.get_group(mesh.ndim - 1)
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    for mixture in model.modules():
        if hasattr(mixture, EXPERT_ENDS):
            mixture.token_exchange = TokenExchange(group, mixture.num_experts)
    sharded = set()
    for module, name, parameter in find_experts(model):
        rows = parameter.detach().chunk(group.size())[group.rank()].clone()
        tensor = DTensor.from_local(rows, mesh, placements, run_check=False)
        shard = nn.Parameter(tensor, parameter.requires_grad)
        store_parameter(module, name, shard)
        sharded.add(shard)
    return sharded


def average_gradients(experts: Sequence[Any]) -> None:
    """Divide the gradients of experts in place as FSDP divides those of other parameters, by the
    number of ranks. Before, they are sums over the tokens of the ranks that exchange tokens."""
    if experts:
        mesh = experts[0].device_mesh
        gradients = [local_part(parameter.grad) for parameter in experts]
        if mesh.ndim > 1:
            all_reduce_sum(gradients, mesh.get_group(0))
        foreach_mul_(gradients, 1 / mesh.size())
