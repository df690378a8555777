"""Tensor parallelism: every layer's matrices split over processes (Megatron-LM, 1909.08053).

Letters as in decoder.py; R processes. A `column` matrix is split by rows (heads, or hidden units of
an MLP), the `row` matrix after it by columns (each product is one term of a sum). With sequence
parallelism (2205.05198) what lies between, norms, residuals and dropout, is split along the tokens:
an all-gather precedes attention and MLP, a reduce-scatter follows. Without, everybody computes all
of it, and one all-reduce follows. The loss is split by vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, parallel
from torch.distributed.tensor.placement_types import Placement

from distributed_training.models.decoder import IGNORE_INDEX, Decoder, Role


def apply_tp(model: Decoder, mesh: DeviceMesh, *, sequence_parallel: bool) -> set[str]:
    """Split a model, or a stage of one, over the one-axis `mesh`, in place: parameters become
    DTensors, and between split layers tensors are local, [B, T / R, D] with sequence parallelism.

    Returns the names of parameters that each process uses on its own tokens: their gradients are
    still to be summed over `mesh` (gradients.sum_gradients).
    """
    between: Placement = Shard(1) if sequence_parallel else Replicate()
    styles: dict[Role, parallel.ParallelStyle] = {
        "column": parallel.ColwiseParallel(input_layouts=between),
        "row": parallel.RowwiseParallel(output_layouts=between),
        "whole": _OnOwnTokens(),
        "positions": _OnOwnTokens(shift=sequence_parallel),
        "vocabulary": parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
    }
    roles = model.find_roles()
    for name, role in roles.items():
        if role == "vocabulary":
            _pad_rows(model.get_submodule(name), mesh.size())
    parallel.parallelize_module(model, mesh, {name: styles[role] for name, role in roles.items()})
    for block in model.blocks.values() if model.dropout and not sequence_parallel else ():
        attention = getattr(block, model.attention)
        with_masks = partial(_with_own_masks, attention, mesh.get_local_rank())
        setattr(block, model.attention, with_masks)
    if model.is_last:
        model.loss = partial(_split_loss, mesh, between)
        model.project = partial(_split_projection, mesh, between)
    return {
        f"{name}.{parameter}"
        for name, role in roles.items()
        if sequence_parallel and role in ("whole", "positions")
        for parameter, _ in model.get_submodule(name).named_parameters()
    }


@dataclass
class _OnOwnTokens(parallel.ParallelStyle):
    """All processes hold the parameters, and each uses them on the tokens that it has. Were DTensor
    not told that these are all, it would sum gradients one by one, each micro-batch, in bf16."""

    shift: bool = False  # the input is positions counted from the process's first token, [T / R]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
            (x,) = inputs
            if self.shift:
                x = x + mesh.get_local_rank() * x.shape[0]
            return DTensor.from_local(x, mesh, [Replicate()], run_check=False)

        return distribute_module(
            module, device_mesh, None, enter, lambda _module, output, _mesh: output.to_local()
        )


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
) -> torch.Tensor:
    """As decoder.summed_cross_entropy, with output rows that are split, and the same on every
    process. 2 all-reduces of fp32 over `mesh`: of each target's largest logit, and of its sum of
    exponentials and its own logit; none in backward."""
    rows, targets = weight.to_local(), targets.flatten()  # (P / R, D), (N = B T)
    first = mesh.get_local_rank() * rows.shape[0]
    logits = F.linear(_gather_tokens(x, mesh, layout), rows).flatten(0, 1).float()  # (N, P / R)
    tokens = first + torch.arange(rows.shape[0], device=x.device)
    logits = logits + torch.where(tokens < vocab_size, 0.0, -torch.inf)
    # A process may hold nothing but padding.
    top = logits.detach().amax(dim=1).clamp(min=torch.finfo(torch.float32).min)
    logits = logits - _reduce(top, mesh, "max")[:, None]
    mine = (targets >= first) & (targets < first + rows.shape[0])
    every = torch.arange(len(targets), device=x.device)
    own = torch.where(mine, logits[every, torch.where(mine, targets - first, 0)], 0.0)
    total, own = _reduce(torch.stack([logits.exp().sum(dim=1), own]), mesh, "sum").unbind(0)
    return torch.where(targets == IGNORE_INDEX, 0.0, total.log() - own).sum()


def _reduce(terms: torch.Tensor, mesh: DeviceMesh, how: str) -> torch.Tensor:
    """One all-reduce; backward hands every process the gradient of the result."""
    whole = DTensor.from_local(terms, mesh, [Partial(how)]).redistribute(placements=[Replicate()])
    return whole.to_local()


def _with_own_masks(attention: Any, place: int, x: torch.Tensor) -> torch.Tensor:
    """Attention whose dropout differs between processes, which have different heads; recomputation
    restores the common generator, and so the seed."""
    seed = int(torch.randint(2**62, ()))
    devices = [x.device] if x.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed + place)
        return attention(x)
