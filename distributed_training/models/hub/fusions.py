"""Find layers of a block that can be computed together, by running the block on random numbers."""

import functools
from collections import defaultdict
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from distributed_training.models.hub.regions import Calls

# Functions of gated MLPs in parallel/gated_mlp.py
ACTIVATIONS: dict[str, Any] = {
    "silu": F.silu,
    "gelu": functools.partial(F.gelu, approximate="tanh"),
}


@torch.no_grad()
def find_fusions(block: nn.Module, calls: Calls) -> dict[str, Any]:
    """Return `same_inputs` and `gated_mlps` of a block's BlockKind, from the recorded calls of the
    modules in a block with random weights."""
    groups = defaultdict[Any, list[str]](list)
    for name, call in calls.items():
        if call.args and isinstance(block.get_submodule(name), nn.Linear):
            groups[name.rpartition(".")[0], id(call.args[0])].append(name)
    same_inputs = tuple(tuple(names) for names in groups.values() if len(names) > 1)
    gated_mlps = tuple(
        (*names, activation)
        for first_layers in same_inputs
        for names in _list_triples(block, first_layers)
        for activation in ACTIVATIONS
        if _is_gated(block, calls, activation, *names)
    )
    return {"same_inputs": same_inputs, "gated_mlps": gated_mlps}


def _list_triples(block: nn.Module, pair: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the orders of the layers in a module that has two layers with the same input, and one
    more."""
    parent = pair[0].rpartition(".")[0]
    names = {f"{parent}.{name}" for name, _ in block.get_submodule(parent).named_parameters()}
    others = {name.removesuffix(".weight") for name in names} - {*pair}
    if len(pair) != 2 or len(others) != 1:  # or a layer has a bias
        return []
    return [(*pair, *others), (*pair[::-1], *others)]


def _is_gated(
    block: nn.Module, calls: Calls, activation: str, gate: str, up: str, down: str
) -> bool:
    """Return whether the module that contains three layers computes `down(f(gate(x)) * up(x))`."""
    mlp = gate.rpartition(".")[0]
    gate_output, up_output = calls[gate].copy, calls[up].copy
    is_called = down in calls and mlp in calls and calls[mlp].copy is not None
    if not is_called or gate_output.shape != up_output.shape:
        return False
    expected = block.get_submodule(down)(ACTIVATIONS[activation](gate_output) * up_output)
    return torch.allclose(calls[mlp].copy, expected, rtol=1e-4, atol=1e-5)
