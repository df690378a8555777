"""Implement tensor parallelism as in Megatron-LM (arXiv 1909.08053). The matrices of every layer
are sharded over R ranks.

models/decoder.py defines the other letters in shapes. torch stores matrices transposed. A `column`
matrix is therefore sharded by rows (heads, or hidden units of an MLP), and the following `row`
matrix by columns. Each rank thus computes a partial sum. With sequence parallelism (arXiv
2205.05198), norms, residuals and dropout are sharded by samples if R divides the number of samples,
otherwise by tokens. An all-gather precedes each attention layer and each MLP, and a reduce-scatter
follows it. Without sequence parallelism, all ranks compute the same norms and residuals, and a
single all-reduce follows each attention layer and each MLP. The loss is sharded by vocabulary."""

from collections.abc import Callable
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

from distributed_training.models.chunked_loss import ChunkedCrossEntropy, VocabularyShard
from distributed_training.models.decoder import Decoder, Role
from distributed_training.models.private import store_parameter, stored_parameter
from distributed_training.parallel.mesh import local_part
from distributed_training.parallel.private import LayerStyle


def apply_tp(model: Decoder, mesh: DeviceMesh, tp_parts: tuple[int, int]) -> None:
    """Shard a model or a stage over the one-axis `mesh`, in place.

    Parameters become DTensors. Between sharded layers, activations are local tensors, with samples
    split into `tp_parts[0]` parts and tokens split into `tp_parts[1]` parts."""
    placement = place_activations(tp_parts)
    styles: dict[Role, parallel.ParallelStyle] = {
        "column": parallel.ColwiseParallel(input_layouts=placement),
        "row": _LayerParallel(Shard(-1), placement, dim=1),
        "whole": _LayerParallel(),
        "positions": _LayerParallel(position_parts=tp_parts),
        "vocabulary": _TableParallel(placement),
    }
    roles = model.find_roles()
    for name, role in roles.items():
        if role == "vocabulary":
            _pad_rows(model.get_submodule(name), mesh.size())
    parallel.parallelize_module(model, mesh, {name: styles[role] for name, role in roles.items()})


def is_sharded(parameter: torch.Tensor) -> bool:
    """Return whether tp shards a parameter."""
    return isinstance(parameter, DTensor) and not parameter.placements[0].is_replicate()


def tp_partial_names(model: Decoder) -> set[str]:
    """Return the names of the trained parameters that tp does not shard. Each rank applies these
    only to its own tokens, so their gradients must be summed over the ranks
    (gradients.all_reduce_sum)."""
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not is_sharded(parameter)
    }


def shard_loss(
    loss: ChunkedCrossEntropy, mesh: DeviceMesh, tp_parts: tuple[int, int]
) -> Callable[..., torch.Tensor]:
    """Return the function `loss` of a Decoder whose output layer is sharded over `mesh` by
    vocabulary. The argument is the loss of an unsharded model."""
    return partial(_vocab_parallel_loss, mesh, place_activations(tp_parts), loss)


def place_activations(tp_parts: tuple[int, int]) -> Placement:
    """Return the placement of the activations between sharded layers."""
    return Shard(0 if tp_parts[0] > 1 else 1)


@dataclass
class _LayerParallel(LayerStyle):
    """Parallel style for a layer with replicated parameters or, if `dim` is set, with a weight that
    is sharded along `dim`.

    A matrix sharded by columns computes a partial sum. Each rank adds the bias after the reduction,
    so the matrix multiplication and the reduction can be fused. Without this class, DTensor would
    sum the gradients of replicated parameters one at a time, per micro-batch and in bf16. The class
    RowwiseParallel in torch can return a tensor whose collective has not finished. A compiled block
    cannot use such a tensor, because the gradient of the block's input would be incomplete."""

    input_layout: Placement = field(default_factory=Replicate)
    output_layout: Placement = field(default_factory=Replicate)
    dim: int | None = None
    # Numbers of parts into which samples and tokens are split, for position inputs. Each rank has
    # one part. The inputs are [T / R], counted from the rank's first token, or [B, T] for all
    # tokens.
    position_parts: tuple[int, int] = (1, 1)

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def partition_fn(_name: str, layer: Any, mesh: DeviceMesh) -> None:
            if self.dim is not None:
                layer.adds_bias = False
                weight = nn.Parameter(distribute_tensor(layer.weight, mesh, [Shard(self.dim)]))
                layer.register_parameter("weight", weight)

        def input_fn(_module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
            (x,) = inputs
            x = _local_positions(x, self.position_parts, mesh.get_local_rank())
            return DTensor.from_local(x, mesh, [self.input_layout], run_check=False)

        def output_fn(layer: Any, output: DTensor, _mesh: DeviceMesh) -> torch.Tensor:
            y = output.redistribute(placements=[self.output_layout]).to_local()
            bias = None if self.dim is None else getattr(layer, "bias", None)
            return y if bias is None else y + bias.to_local().to(y.dtype)

        return distribute_module(module, device_mesh, partition_fn, input_fn, output_fn)


@dataclass
class _TableParallel(LayerStyle):
    """Parallel style for a table of embeddings whose rows are sharded over the vocabulary. DTensor
    would compute the gradient of all rows on each rank."""

    output_layout: Placement

    def apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        module.weight = nn.Parameter(distribute_tensor(module.weight, device_mesh, [Shard(0)]))
        look_up_rows(module, device_mesh, self.output_layout)
        return module  # type: ignore[no-any-return]


def look_up_rows(table: Any, mesh: DeviceMesh, placement: Placement) -> None:
    """Let a table of embeddings with sharded rows return this rank's part of the embeddings of all
    token ids, [B, T] -> [B, T, D]."""
    num_rows = len(stored_parameter(table, "weight")) // mesh.size()
    first = mesh.get_local_rank() * num_rows
    forward = table.forward
    if table.padding_idx is not None:
        own_padding = table.padding_idx - first
        table.padding_idx = own_padding if 0 <= own_padding < num_rows else None

    def look_up(ids: torch.Tensor) -> torch.Tensor:
        own_ids = ids - first
        is_missing = (own_ids < 0) | (own_ids >= num_rows)
        # The table's own forward may also scale the rows, as in Gemma.
        weight = stored_parameter(table, "weight")
        store_parameter(table, "weight", weight.to_local())
        found = forward(own_ids.masked_fill(is_missing, 0))
        store_parameter(table, "weight", weight)
        own_term = found.masked_fill(is_missing[..., None], 0)
        embedded = DTensor.from_local(own_term, mesh, [Partial()], run_check=False)
        return embedded.redistribute(placements=[placement]).to_local()

    table.forward = look_up


def _local_positions(x: torch.Tensor, parts: tuple[int, int], rank: int) -> torch.Tensor:
    """Return the positions of this rank's tokens. Samples are split into `parts[0]` parts, and
    tokens are split into `parts[1]` parts. If `x` has the shape [B, T], it contains the positions
    of all tokens, so return this rank's part. If `x` has the shape [T / R], its positions are
    relative to this rank's first token, so add the number of earlier tokens."""
    for dim, count in enumerate(parts):
        if count > 1 and x.dim() == 2:
            x = x.chunk(count, dim)[rank]
        elif count > 1 and dim == 1:
            x = x + rank * x.shape[0]
    return x


def _pad_rows(table: Any, multiple: int) -> None:
    """Append zero rows to an embedding until `multiple` divides the number of rows."""
    num_missing = -table.num_embeddings % multiple
    if num_missing:
        padding = (0, 0, 0, num_missing)
        table.weight = nn.Parameter(F.pad(table.weight.detach(), padding))
        table.num_embeddings += num_missing


def _vocab_parallel_loss(
    mesh: DeviceMesh,
    placement: Placement,
    loss: ChunkedCrossEntropy,
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    vocab_size: int,
    cap: float = 0.0,
) -> torch.Tensor:
    """Compute `decoder.summed_cross_entropy` with the rows of the output layer's `weight` sharded
    over the ranks."""
    rows = local_part(weight)  # [P / R, D]
    first = mesh.get_local_rank() * rows.shape[0]
    shard = VocabularyShard(first, mesh.get_group())
    own_tokens = DTensor.from_local(x, mesh, [placement])
    gathered = own_tokens.redistribute(placements=[Replicate()])
    # The backward pass sums the gradients over the ranks.
    all_tokens = gathered.to_local(grad_placements=[Partial()])
    return loss(all_tokens, rows, targets, vocab_size, shard, cap)
