"""Tensor parallelism: every layer's matrices split over processes (Megatron-LM, 1909.08053).

Letters as in model.py; R is the number of processes, "split" means over them. Per block:

    qkv, mlp_in             split by rows: each process has H / R heads, 4 D / R hidden units
    attention_out, mlp_out  split by columns: each process's product is one term of a sum

so that one exchange precedes and one follows attention and MLP. With sequence parallelism
(2205.05198) what lies between, norms, residuals and dropout, is split along the tokens, and the
exchanges are an all-gather and a reduce-scatter; without, everybody computes all of it, and the
exchange is one all-reduce after each. The embedding is split by vocabulary, and so is the loss: no
process ever holds all logits of its samples.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from distributed_training.model import GPT2, IGNORE_INDEX


def apply_tp(model: GPT2, mesh: DeviceMesh, *, sequence_parallel: bool) -> set[str]:
    """Split a model, or a stage of one, over the one-axis `mesh`, in place.

    Every parameter becomes a DTensor, those that all processes hold too. Between split layers
    tensors are plain and local: [B, T / R, D] with sequence parallelism, else [B, T, D].

    Returns the names of the parameters whose gradients are, on each process, one term of a sum over
    `mesh` that is still to be taken (gradients.add_up): with sequence parallelism those of norms
    and positions, which every process uses for its own tokens.
    """
    between: Placement = Shard(1) if sequence_parallel else Replicate()
    whole = _OnOwnTokens()
    for block in model.blocks.values():
        plan = {
            "norm_1": whole,
            "qkv": ColwiseParallel(input_layouts=between),
            "attention_out": RowwiseParallel(output_layouts=between),
            "norm_2": whole,
            "mlp_in": ColwiseParallel(input_layouts=between),
            "mlp_out": RowwiseParallel(output_layouts=between),
        }
        parallelize_module(block, mesh, plan)
        if block.dropout and not sequence_parallel:
            block.attention = partial(_with_own_masks, block.attention, mesh.get_local_rank())
    ends: dict[str, ParallelStyle] = {}
    if hasattr(model, "token_embedding"):
        _pad_rows(model.token_embedding, mesh.size())
        ends["token_embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    if hasattr(model, "position_embedding"):
        ends["position_embedding"] = _OnOwnTokens(take_share=sequence_parallel)
    if hasattr(model, "norm_out"):
        ends["norm_out"] = whole
        model.loss = _SplitLoss(mesh, between)
        model.project = partial(_split_projection, mesh, between)
    parallelize_module(model, mesh, ends)
    names = [name for name, _ in model.named_parameters()]
    ours = [name for name in names if "norm" in name or "position" in name]
    return set(ours) if sequence_parallel else set()


class _OnOwnTokens(ParallelStyle):
    """All processes hold the parameters, and each uses them on the tokens that it has.

    DTensor is told that these are all tokens, so that it exchanges nothing: else it would add up
    the gradients of each parameter by itself and, under FSDP, of each micro-batch, in bf16.
    """

    def __init__(self, *, take_share: bool = False) -> None:
        """With `take_share` the input is that of all tokens, [T], and each takes its own of it."""
        super().__init__()
        self.take_share = take_share

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
            (x,) = inputs
            if self.take_share:
                x = x.chunk(mesh.size())[mesh.get_local_rank()]
            return DTensor.from_local(x, mesh, [Replicate()], run_check=False)

        def leave(_module: nn.Module, output: Any, mesh: DeviceMesh) -> torch.Tensor:
            return output.to_local()

        return distribute_module(module, device_mesh, None, enter, leave)


def _pad_rows(embedding: nn.Embedding, multiple: int) -> None:
    """Append zero rows until `multiple` divides their number; they are padding like the others."""
    missing = -embedding.num_embeddings % multiple
    if missing:
        embedding.weight = nn.Parameter(F.pad(embedding.weight.detach(), (0, 0, 0, missing)))
        embedding.num_embeddings += missing


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


class _SplitLoss:
    """Summed cross entropy of hidden states against output rows that are split; fp32, [] ."""

    def __init__(self, mesh: DeviceMesh, layout: Placement) -> None:
        self.mesh, self.layout = mesh, layout

    def __call__(
        self, x: torch.Tensor, weight: DTensor, targets: torch.Tensor, vocab_size: int
    ) -> torch.Tensor:
        rows = weight.to_local()  # (P / R, D)
        x = _gather_tokens(x, self.mesh, self.layout)  # (B, T, D)
        first = self.mesh.get_local_rank() * rows.shape[0]
        logits = F.linear(x, rows).flatten(0, 1)  # (B T, P / R)
        return split_cross_entropy(
            logits, targets.flatten(), first, vocab_size, self.mesh.get_group()
        )


def split_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, first: int, vocab_size: int, group: Any
) -> torch.Tensor:
    """Cross entropies of [N, V / R] logits summed over N targets, the same on every process.

    The process's columns are tokens `first`, `first` + 1, ...; those from `vocab_size` on are
    padding. Three numbers a target travel: the maximum, the sum of exponentials, the target's own
    logit (2 all-reduces of fp32 over `group`).
    """
    return _SplitCrossEntropy.apply(logits, targets, first, vocab_size, group)


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, first, vocab_size, group):  # type: ignore[no-untyped-def]
        columns = torch.arange(logits.shape[1], device=logits.device)
        x = logits.float().masked_fill(first + columns >= vocab_size, -torch.inf)
        # A process may hold nothing but padding.
        top = x.max(dim=1).values.clamp(min=torch.finfo(torch.float32).min)
        top = collectives.all_reduce(top, "max", group)
        exponentials = (x - top[:, None]).exp()
        local = targets - first
        mine = (local >= 0) & (local < x.shape[1])
        local = torch.where(mine, local, 0)
        own = torch.where(mine, x.gather(1, local[:, None])[:, 0] - top, 0.0)
        sums = torch.stack([exponentials.sum(dim=1), own])
        total, own = collectives.all_reduce(sums, "sum", group).unbind(0)
        counted = targets != IGNORE_INDEX
        ctx.save_for_backward(exponentials / total[:, None], local, mine & counted, counted)
        ctx.dtype = logits.dtype
        return torch.where(counted, total.log() - own, 0.0).sum()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        probabilities, local, mine, counted = ctx.saved_tensors
        of_logits = probabilities * counted[:, None]
        of_logits = of_logits.scatter_add(1, local[:, None], -mine[:, None].float())
        return (of_logits * gradient).to(ctx.dtype), None, None, None, None


def _with_own_masks(attention: Any, place: int, x: torch.Tensor) -> torch.Tensor:
    """Attention whose dropout differs between processes (each has other heads), among layers whose
    masks must be the same on all. The seed is drawn from the common generator, so recomputation
    in the backward pass, which restores that one, finds the same masks again.
    """
    seed = int(torch.randint(2**62, ()))
    devices = [x.device] if x.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed + place)
        return attention(x)
