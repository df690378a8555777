"""Tensor parallelism: every layer's matrices split over processes (Megatron-LM, 1909.08053).
Letters as in decoder.py; R processes. A `column` matrix is split by rows (heads, or hidden units of
an MLP), the `row` matrix after it by columns (each product is one term of a sum). With sequence
parallelism (2205.05198) what lies between, norms, residuals and dropout, is split, by samples where
R divides them, else along the tokens: an all-gather precedes attention and MLP, a reduce-scatter
follows. Without, all compute all of it; one all-reduce follows. The loss is split by vocabulary."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    parallel,
)
from torch.distributed.tensor.placement_types import Placement

from distributed_training.data.samples import IGNORE_INDEX
from distributed_training.models.chunked_loss import ChunkedCrossEntropy, Split
from distributed_training.models.decoder import Decoder, Role
from distributed_training.parallel.private import all_gather_functional, all_reduce_functional


def apply_tp(model: Decoder, mesh: DeviceMesh, parts: tuple[int, int]) -> set[str]:
    """Split a model, or a stage of one, over the one-axis `mesh`, in place: parameters become
    DTensors, and between split layers tensors are local, of `parts` of the samples and tokens.
    Returns the names of parameters that each process uses on its own tokens: their gradients are
    still to be summed over `mesh` (gradients.add_up)."""
    sequence_parallel = max(parts) > 1
    between: Placement = Shard(0 if parts[0] > 1 else 1) if sequence_parallel else Replicate()
    styles: dict[Role, parallel.ParallelStyle] = {
        "column": parallel.ColwiseParallel(input_layouts=between),
        "row": _Layer(Shard(-1), between, dim=1),
        "whole": _Layer(),
        "heads": _Layer(),
        "positions": _Layer(parts=parts),
        "vocabulary": _Layer(Replicate(), between, dim=0),
    }
    roles = model.find_roles()
    for name, role in roles.items():
        if role == "vocabulary":
            _pad_rows(model.get_submodule(name), mesh.size())
    parallel.parallelize_module(model, mesh, {name: styles[role] for name, role in roles.items()})
    if model.dropout and not sequence_parallel:
        for block in model.blocks.values():  # dropout masks of attention belong to heads
            block.attention = partial(with_own_masks, block.attention, mesh.get_local_rank())
    if model.is_last:
        model.loss = partial(_split_loss, mesh, between)
        model.project = partial(_split_projection, mesh, between)
    return {
        f"{name}.{parameter}"
        for name, role in roles.items()
        for parameter, _ in model.get_submodule(name).named_parameters()
        if role == "heads"
        or (sequence_parallel and role in ("whole", "positions"))
        or (sequence_parallel and (role, parameter) == ("row", "bias"))
    }


@dataclass
class _Layer(parallel.ParallelStyle):
    """Parameters of which each process holds all, for the tokens that it has (were DTensor not told
    that these are all, it would sum gradients one by one, each micro-batch, in bf16). With `dim`
    the weight is split, and each output is one term of a sum: a matrix by columns, a table by rows.
    Each adds the bias to what it has of the sum, so that nothing comes between product and sum, and
    both may be one. torch's RowwiseParallel may return what is still on its way: a compiled block
    cannot take that, as the gradient of its input would miss a step."""

    given: Placement = field(default_factory=Replicate)  # of the input
    between: Placement = field(default_factory=Replicate)  # of the output
    dim: int | None = None
    # The input is positions: counted from the process's first token, [T / R], or of all, [B, T].
    parts: tuple[int, int] = (1, 1)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def split(_name: str, layer: Any, mesh: DeviceMesh) -> None:
            if self.dim is not None:
                layer.adds_bias = False
                weight = nn.Parameter(distribute_tensor(layer.weight, mesh, [Shard(self.dim)]))
                layer.register_parameter("weight", weight)

        def enter(_module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
            (x,) = inputs
            x = _own_positions(x, self.parts, mesh.get_local_rank())
            return DTensor.from_local(x, mesh, [self.given], run_check=False)

        def leave(layer: Any, output: DTensor, _mesh: DeviceMesh) -> torch.Tensor:
            y = output.redistribute(placements=[self.between]).to_local()
            bias = None if self.dim is None else getattr(layer, "bias", None)
            return y if bias is None else y + bias.to_local().to(y.dtype)

        return distribute_module(module, device_mesh, split, enter, leave)


def _own_positions(x: torch.Tensor, parts: tuple[int, int], rank: int) -> torch.Tensor:
    """The positions of a process's own `parts` of samples and tokens."""
    for dim, count in enumerate(parts):
        if count > 1 and x.dim() == 2:
            x = x.chunk(count, dim)[rank]
        elif count > 1 and dim == 1:
            x = x + rank * x.shape[0]
    return x


def _pad_rows(table: Any, multiple: int) -> None:
    """Append zero rows until `multiple` divides their number; they are padding like the others."""
    missing = -table.num_embeddings % multiple
    if missing:
        table.weight = nn.Parameter(F.pad(table.weight.detach(), (0, 0, 0, missing)))
        table.num_embeddings += missing


def _gather_tokens(x: torch.Tensor, mesh: DeviceMesh, layout: Placement) -> torch.Tensor:
    """All tokens on every process; gradients of what each makes of them are added up."""
    whole = DTensor.from_local(x, mesh, [layout]).redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[Partial()])


def _split_projection(
    mesh: DeviceMesh, layout: Placement, x: torch.Tensor, weight: DTensor, vocab_size: int
) -> torch.Tensor:
    """Logits [B, T, V] on every process, for generation."""
    local = F.linear(_gather_tokens(x, mesh, layout), weight.to_local())
    return DTensor.from_local(local, mesh, [Shard(2)]).full_tensor()[..., :vocab_size]


def _split_loss(
    mesh: DeviceMesh,
    layout: Placement,
    x: torch.Tensor,
    weight: DTensor,
    targets: torch.Tensor,
    vocab_size: int,
    chunked: ChunkedCrossEntropy | None = None,
) -> torch.Tensor:
    """As decoder.summed_cross_entropy, with output rows that are split; in chunks if given."""
    rows = weight.to_local()  # (P / R, D)
    first = mesh.get_local_rank() * rows.shape[0]
    group = mesh.get_group()
    x = _gather_tokens(x, mesh, layout)
    if chunked is not None:
        return chunked(x, rows, targets, vocab_size, Split(first, group, all_gather_functional))
    logits = F.linear(x, rows).flatten(0, 1)  # (B T, P / R)
    return split_cross_entropy(logits, targets.flatten(), first, vocab_size, group)


class _SplitCrossEntropy(torch.autograd.Function):
    """Cross entropies of [N, P / R] logits (tokens from `first` on) summed over N targets, the same
    on every process. 2 all-reduces of fp32 over `group`: of each target's maximum, and of its sum
    of exponentials and its own logit."""

    @staticmethod
    def forward(ctx, logits, targets, first, vocab_size, group):  # type: ignore[no-untyped-def]
        columns = torch.arange(logits.shape[1], device=logits.device)
        x = logits.float().masked_fill(first + columns >= vocab_size, -torch.inf)
        # A process may hold nothing but padding.
        top = x.max(dim=1).values.clamp(min=torch.finfo(torch.float32).min)
        top = all_reduce_functional(top, "max", group)
        exponentials = (x - top[:, None]).exp()
        local = targets - first
        mine = (local >= 0) & (local < x.shape[1])
        local = torch.where(mine, local, 0)
        own = torch.where(mine, x.gather(1, local[:, None])[:, 0] - top, 0.0)
        sums = torch.stack([exponentials.sum(dim=1), own])
        total, own = all_reduce_functional(sums, "sum", group).unbind(0)
        loss_mask = targets != IGNORE_INDEX
        ctx.save_for_backward(exponentials / total[:, None], local, mine & loss_mask, loss_mask)
        ctx.dtype = logits.dtype
        return torch.where(loss_mask, total.log() - own, 0.0).sum()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        probabilities, local, mine, loss_mask = ctx.saved_tensors
        grad_logits = probabilities * loss_mask[:, None]
        grad_logits = grad_logits.scatter_add(1, local[:, None], -mine[:, None].float())
        return (grad_logits * gradient).to(ctx.dtype), None, None, None, None


split_cross_entropy = _SplitCrossEntropy.apply


def with_own_masks(function: Any, place: int, x: torch.Tensor, *more: Any) -> torch.Tensor:
    """`function` of x, whose dropout differs between processes, which have different heads, or
    columns; recomputation restores the common generator, and so the seed."""
    seed = int(torch.randint(2**62, ()))
    devices = [x.device] if x.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed + place)
        return function(x, *more)
