"""Implement tensor parallelism for models that run transformers' code, by the regions of their
blocks (models/hub/regions.py).

A region's input is gathered from all ranks. In the region, each rank computes with local tensors,
which are its shards. The region's outputs are summed by a reduce-scatter, so that each rank has its
own samples or tokens outside of regions. Every rank thus computes one term of the gradient of each
parameter that is not sharded, in regions and outside of them."""

from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from distributed_training.models.hub.model import HubDecoder
from distributed_training.models.hub.regions import hidden_states, normalize, region_of, split_norms
from distributed_training.models.private import store_parameter, stored_parameter
from distributed_training.parallel.tensor import look_up_rows, place_activations


def apply_regions(model: HubDecoder, mesh: DeviceMesh, tp_parts: tuple[int, int]) -> None:
    """Shard a model or a stage over the one-axis `mesh`, in place, as `apply_tp` does."""
    placement = place_activations(tp_parts)
    gather = partial(_gather_input, mesh, placement)
    reduce = partial(_reduce_output, mesh, placement)
    mean = partial(_mean_over_ranks, mesh)
    model.token_parts = tp_parts[1]
    for index, block in model.blocks.items():
        cuts = model.size.kind_of(int(index)).cuts
        for name, dim in cuts.items():
            owner_name, _, key = name.rpartition(".")
            owner: Any = block.get_submodule(owner_name)
            _shard(owner, key, mesh, dim)
            if dim == 1:
                region = block.get_submodule(region_of(name))
                region.register_forward_pre_hook(gather, with_kwargs=True)
                region.register_forward_hook(reduce)
                owner.bias_factor = 1.0 if mesh.get_local_rank() == 0 else 0.0
        for norm in split_norms(block, cuts):
            norm.forward = partial(normalize, norm, mean)
    # The embedding of a stage that is not the first one is only the output layer.
    for table in {model.token_embedding, model.head} - {None}:
        for key, _ in list(table.named_parameters(recurse=False)):
            _shard(table, key, mesh, 0, multiple=8)
    if model.is_first:
        look_up_rows(model.token_embedding, mesh, placement)


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
