"""Implement expert parallelism: a mixture's experts stay on their ranks, and tokens travel to them.

FSDP shards a stack of E matrices along its first dimension, so that each of n ranks has E / n whole
experts. Expert parallelism leaves these shards where they are. The ranks gather the tokens of all
ranks, each computes its own experts, and a reduce-scatter sums the results. If tokens choose fewer
experts than there are ranks, only the chosen rows travel. Checkpoints and the optimizer see the
same shards as under FSDP.

All shapes are static. If the router chooses the experts of one rank so often that its buffers have
too few rows, the update is skipped on all ranks, and the step is repeated with larger buffers, so
that no token is dropped."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from distributed_training.models.decoder import EXPERT_ENDS
from distributed_training.models.hub.experts import STACKS, CombineRows, SpreadTokens
from distributed_training.models.private import local_part, store_parameter
from distributed_training.parallel.exchanges import all_to_all, gather_tokens, sum_tokens
from distributed_training.parallel.gradients import all_reduce_sum
from distributed_training.parallel.private import foreach_mul_
from distributed_training.plan.layout import EXPERT_ROWS

# For S rows that travel: the index of each row's token [S], and of each token's rows [N, k]
Route = tuple[torch.Tensor, torch.Tensor]


class TokenExchange:
    """Exchange of tokens between the ranks that share a mixture's experts. models/hub/experts.py
    calls this object if it is an attribute of the mixture. `row_factor` is the number of rows for
    which there are buffers, in multiples of the mean over ranks. `needed_factor`, an fp32 scalar,
    becomes the largest that a forward pass of training needed."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_experts: int,
        row_factor: float,
        needed_factor: torch.Tensor,
    ) -> None:
        self.num_ranks = group.size()
        self.row_factor = row_factor
        self.needed_factor = needed_factor
        self.group_name = group.group_name
        self.num_experts = num_experts // group.size()  # on each rank
        self.first = group.rank() * self.num_experts  # this rank's first expert

    @property
    def is_limited(self) -> bool:
        """True if a step may need larger buffers."""
        return self.row_factor < self.num_ranks

    def send(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, *, may_repeat: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Route | None]:
        """Send the tokens x [N, D], with `weights` and experts `chosen` [N, k], to the ranks of
        their experts. Return what this rank received, and what `receive` needs: all tokens, or, if
        the step may be repeated and less travels, rows with one expert each. The indices of experts
        are among this rank's, or `num_experts` for rows that it need not compute."""
        moves_less = chosen.shape[1] < self.num_ranks
        if may_repeat and self.is_limited and moves_less:
            return self._send_chosen(x, weights, chosen)
        x, weights, chosen = (gather_tokens(t, self.group_name) for t in (x, weights, chosen))
        own = chosen - self.first
        own = torch.where((own >= 0) & (own < self.num_experts), own, self.num_experts)
        return x, weights, own, None

    def _send_chosen(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Route]:
        num_pairs = chosen.numel()
        room = math.ceil(self.row_factor * num_pairs / self.num_ranks)  # for each rank
        num_slots = self.num_ranks * room
        ids, order = chosen.flatten().sort(stable=True)
        ranks = ids // self.num_experts
        numbers = torch.arange(self.num_ranks, device=x.device)
        ends = torch.searchsorted(ranks, numbers, right=True)
        starts = torch.searchsorted(ranks, numbers)
        self._note_need((ends - starts).max(), num_pairs)
        place = torch.arange(num_pairs, device=x.device) - starts[ranks]
        slots = torch.where(place < room, ranks * room + place, num_slots)
        # Pair of a token and an expert in each slot. The last slot, for pairs without one, is cut.
        pairs = order.new_full((num_slots + 1,), num_pairs)
        pairs[slots] = order
        pairs = pairs[:-1]
        is_empty = pairs == num_pairs
        pairs = pairs.clamp(max=num_pairs - 1)
        places = torch.empty_like(order)
        places[order] = slots.clamp(max=num_slots - 1)
        route = pairs // chosen.shape[1], places.view_as(chosen)
        own = torch.where(is_empty, self.num_experts, chosen.flatten()[pairs] % self.num_experts)
        rows = SpreadTokens.apply(x, *route)
        sent = rows, weights.flatten().gather(0, pairs)[:, None], own[:, None]
        x, weights, own = (all_to_all(t, self.group_name) for t in sent)
        return x, weights, own, route

    def receive(self, y: torch.Tensor, route: Route | None) -> torch.Tensor:
        """Return the results of this rank's tokens [N, D], for those of what `send` returned."""
        if route is None:
            return sum_tokens(y, self.group_name)
        return CombineRows.apply(all_to_all(y, self.group_name), *route)

    def _note_need(self, num_rows: torch.Tensor, num_pairs: int) -> None:
        needed = num_rows / (num_pairs / self.num_ranks)
        self.needed_factor.copy_(torch.maximum(self.needed_factor, needed))

    def limit_rows(self, ends: torch.Tensor, num_rows: int) -> int:
        """Return for how many of the pairs of tokens and experts there are buffers. `ends` contains
        the numbers of pairs up to the end of each of this rank's experts."""
        self._note_need(ends[-1], num_rows)
        # The last row belongs to no expert of this rank, unless there are buffers for all.
        return min(num_rows, math.ceil(self.row_factor * num_rows / self.num_ranks) + 1)


def find_experts(model: nn.Module) -> Iterator[tuple[Any, str, nn.Parameter]]:
    """Yield each parameter with one row per expert, and its module and name in it: stacks, their
    biases, adapters and quantization scales."""
    for mixture in model.modules():
        if hasattr(mixture, EXPERT_ENDS):
            for path, parameter in list(mixture.named_parameters()):
                if path.startswith(tuple(STACKS)):
                    owner, _, name = path.rpartition(".")
                    yield mixture.get_submodule(owner), name, parameter


def shard_experts(model: nn.Module, mesh: DeviceMesh, row_factor: float) -> set[nn.Parameter]:
    """Give each rank along the last axis of `mesh` its own experts of every mixture, in place.
    `row_factor` is that of every `TokenExchange`. Return the sharded parameters, which FSDP must
    ignore."""
    group = mesh.get_group(mesh.ndim - 1)
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    needed = torch.zeros((), device=mesh.device_type)
    for mixture in model.modules():
        if hasattr(mixture, EXPERT_ENDS):
            mixture.token_exchange = TokenExchange(group, mixture.num_experts, row_factor, needed)
    sharded = set()
    for module, name, parameter in find_experts(model):
        rows = parameter.detach().chunk(group.size())[group.rank()].clone()
        tensor = DTensor.from_local(rows, mesh, placements, run_check=False)
        shard = nn.Parameter(tensor, parameter.requires_grad)
        store_parameter(module, name, shard)
        sharded.add(shard)
    return sharded


def find_exchanges(model: nn.Module) -> list[TokenExchange]:
    """Return the exchanges of all mixtures, which have one `needed_factor`."""
    return [m.token_exchange for m in model.modules() if hasattr(m, "token_exchange")]


def needs_larger_buffers(exchanges: Sequence[TokenExchange]) -> torch.Tensor:
    """Return whether any rank had too few buffers in a step, a bool on the device that is equal on
    all ranks."""
    needed = exchanges[0].needed_factor
    dist.all_reduce(needed, dist.ReduceOp.MAX)
    return needed > exchanges[0].row_factor


def enlarge_buffers(exchanges: Sequence[TokenExchange]) -> bool:
    """If the last step needed larger buffers, provide them, with a margin. Return whether it did.
    The host waits for the step."""
    if not exchanges or not exchanges[0].is_limited:
        return False
    needed = exchanges[0].needed_factor.item()
    if needed <= exchanges[0].row_factor:
        return False
    for exchange in exchanges:
        exchange.row_factor = EXPERT_ROWS * needed
    return True


def average_gradients(experts: Sequence[Any]) -> None:
    """Divide the gradients of experts in place as FSDP divides those of other parameters, by the
    number of ranks. Before, they are sums over the tokens of the ranks that exchange tokens."""
    if experts:
        mesh = experts[0].device_mesh
        gradients = [local_part(parameter.grad) for parameter in experts]
        if mesh.ndim > 1:
            all_reduce_sum(gradients, mesh.get_group(0))
        foreach_mul_(gradients, 1 / mesh.size())
