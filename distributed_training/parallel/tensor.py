"""Implement tensor parallelism as in Megatron-LM (arXiv 1909.08053). The matrices of every layer
are sharded over R ranks.

models/decoder.py defines the other letters in shapes. torch stores matrices transposed, so the
first matrices of attention or an MLP are sharded by rows (heads, or hidden units of an MLP), and
the last matrix by columns. Between them, each rank computes with local tensors, which are its
shards, so its result is a term of a sum over ranks. Everything else (norms, residuals and dropout)
is sharded by samples if R divides the number of samples, otherwise by tokens (sequence parallelism,
arXiv 2205.05198). An all-gather precedes each attention layer and each MLP, and a reduce-scatter
follows it. Every rank thus computes one term of the gradient of each parameter that is not sharded.
The loss is sharded by vocabulary."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from distributed_training.models.chunked_loss import ChunkedCrossEntropy, VocabularyShard
from distributed_training.models.decoder import Decoder, Positions
from distributed_training.models.hub.model import HubDecoder
from distributed_training.models.hub.regions import hidden_states, normalize, region_of, split_norms
from distributed_training.models.private import local_part, store_parameter, stored_parameter


def apply_tp(model: Decoder, mesh: DeviceMesh, tp_parts: tuple[int, int]) -> None:
    """Shard a model or a stage over the one-axis `mesh`, in place.

    The parameters in `BlockKind.cuts` and the tables of the vocabulary become DTensors. Outside of
    the regions of a block (models/hub/regions.py), activations are local tensors, with samples
    split into `tp_parts[0]` parts and tokens split into `tp_parts[1]` parts. If a region is no
    module, as in GPT-2, its first and its last layer exchange activations instead."""
    placement = place_activations(tp_parts)
    gather = partial(_gather_input, mesh, placement)
    reduce = partial(_reduce_output, mesh, placement)
    mean = partial(_mean_over_ranks, mesh)
    for index, block in model.blocks.items():
        cuts = model.size.kind_of(int(index)).cuts
        for name, dim in cuts.items():
            owner_name, _, key = name.rpartition(".")
            owner: Any = block.get_submodule(owner_name)
            _shard(owner, key, mesh, dim)
            region = region_of(name)
            module = block.get_submodule(region or owner_name)
            if dim == (1 if region else 0) and key == "weight":
                module.register_forward_pre_hook(gather, with_kwargs=True)
            if dim == 1:
                module.register_forward_hook(reduce)
                owner.bias_factor = 1.0 if mesh.get_local_rank() == 0 else 0.0
            if dim == 1 and not region:
                # A product without a bias can be fused with the reduction.
                owner.bias_factor = None
                owner.register_forward_hook(_add_bias)
        for norm in split_norms(block, cuts).values():
            norm.forward = partial(normalize, norm, mean)
    for name in model.vocabulary_parameters():
        table, _, key = name.rpartition(".")
        _shard(model.get_submodule(table), key, mesh, 0, multiple=8)
    if model.is_first:
        look_up_rows(model.token_embedding, mesh, placement)
    if isinstance(model, HubDecoder):
        model.token_parts = tp_parts[1]
    else:
        model.place = partial(  # type: ignore[method-assign]
            _place_own, model.place, mesh, placement
        )


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


def place_activations(tp_parts: tuple[int, int]) -> Shard:
    """Return the placement of the activations between sharded layers."""
    return Shard(0 if tp_parts[0] > 1 else 1)


def look_up_rows(table: Any, mesh: DeviceMesh, placement: Shard) -> None:
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


def _place_own(
    place: Callable[..., torch.Tensor],
    mesh: DeviceMesh,
    placement: Shard,
    x: torch.Tensor,
    positions: Positions = 0,
) -> torch.Tensor:
    """Call the method `place` of a decoder for this rank's part of the embeddings. `positions` are
    those of all tokens."""
    rank = mesh.get_local_rank()
    if isinstance(positions, int):
        positions += placement.dim * rank * x.shape[1]
    else:
        positions = positions.chunk(mesh.size(), placement.dim)[rank]
    return place(x, positions)


def _add_bias(layer: Any, _args: tuple[Any, ...], y: torch.Tensor) -> torch.Tensor:
    return y if layer.bias is None else y + layer.bias.to(y.dtype)


def _shard(module: Any, key: str, mesh: DeviceMesh, dim: int, multiple: int = 1) -> None:
    """Shard a parameter of a module, after appending zeros until each shard has a multiple of
    `multiple` rows."""
    parameter = stored_parameter(module, key).detach()
    num_missing = -len(parameter) % (mesh.size() * multiple)
    if dim == 0 and num_missing:
        parameter = F.pad(parameter, [0] * (2 * parameter.dim() - 1) + [num_missing])
    shard = distribute_tensor(parameter, mesh, [Shard(dim)])
    store_parameter(module, key, nn.Parameter(shard))


def _gather_input(
    mesh: DeviceMesh, placement: Any, _region: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    own = DTensor.from_local(hidden_states(args, kwargs), mesh, [placement], run_check=False)
    gathered = own.redistribute(placements=[Replicate()])
    x = gathered.to_local(grad_placements=[Partial()])  # sums gradients over the ranks
    return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})


def _reduce_output(
    mesh: DeviceMesh, placement: Any, _region: Any, _args: tuple[Any, ...], output: Any
) -> Any:
    if isinstance(output, tuple):  # such as attention, which also returns its weights
        return (_reduce_output(mesh, placement, _region, _args, output[0]), *output[1:])
    terms = DTensor.from_local(output.contiguous(), mesh, [Partial()], run_check=False)
    return terms.redistribute(placements=[placement]).to_local()


def _mean_over_ranks(mesh: DeviceMesh, own: torch.Tensor) -> torch.Tensor:
    terms = DTensor.from_local(own / mesh.size(), mesh, [Partial()], run_check=False)
    mean = terms.redistribute(placements=[Replicate()])
    return mean.to_local(grad_placements=[Partial()])


def _vocab_parallel_loss(
    mesh: DeviceMesh,
    placement: Shard,
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
