"""Separate the packed records of a sample in blocks that are not only attention, and test whether a
block computes each record as if it were alone.

Blocks with linear attention convolve neighboring tokens, and pass on a state from token to token.
In the models that this package builds, the functions in this module replace those of transformers
that do so. Like attention, they get the boundaries of the records as the option `documents`."""

import functools
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from distributed_training.models import private
from distributed_training.models.attention import Documents, mask_documents
from distributed_training.models.hub.linear_attention import gated_delta_rule

_LINEAR_ATTENTION = "torch_chunk_gated_delta_rule"
# Logarithm of the factor by which the state is multiplied before a record. Smaller factors lose
# digits of the logarithms of other factors, which are summed up over a chunk.
_RESET = -30.0
# Positions of the tokens of two records, on the CPU wherever this module is imported
_POSITIONS = torch.arange(4, device="cpu").repeat(1, 2)
_IS_SECOND = torch.arange(8, device="cpu") >= 4


def separate_recurrences(net: nn.Module) -> None:
    """Make the convolutions and linear attention of a model separate packed records. The code of
    transformers, which other models in this process use, stays as it is."""
    for module in net.modules():
        module.__class__ = _separating_class(type(module))  # type: ignore[arg-type]


def has_linear_attention(net: nn.Module) -> bool:
    """Return whether a model's code computes linear attention."""
    modules = {type(module).__module__ for module in net.modules()}
    return any(hasattr(sys.modules[name], _LINEAR_ATTENTION) for name in modules)


@functools.cache  # Modules of one class share a subclass, so that torch.compile shares one graph.
def _separating_class(cls: Any) -> Any:
    """Return a subclass of the module class `cls` whose methods call the functions of this module,
    or `cls` if its methods call none that they replace."""
    members = {}
    for name, method in inspect.getmembers(cls, inspect.isfunction):
        method = inspect.unwrap(method)  # Decorators rename old arguments, and run hooks.
        functions = method.__globals__
        called = _WRAPPERS.keys() & functions.keys() & {*method.__code__.co_names}
        if called:
            functions = functions | {key: _WRAPPERS[key](functions[key]) for key in called}
            members[name] = types.FunctionType(
                method.__code__, functions, name, method.__defaults__, method.__closure__
            )
    if not members:
        return cls
    return type(cls.__name__, (cls,), {**members, "__module__": cls.__module__})


def _separate_convolution(convolve: Callable[..., torch.Tensor]) -> Any:
    @functools.wraps(convolve)
    def wrapper(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        documents: Documents | None = None,
        **_options: Any,
    ) -> torch.Tensor:
        """Convolve x [B, C, T] with a weight [C, W] for each channel. The last of the W values
        belongs to the token itself."""
        positions = None if documents is None else documents.positions
        y = _Convolution.apply(x.to(weight.dtype), weight, positions)
        if bias is not None:
            y = y + bias[:, None]
        y = y if activation is None else getattr(F, activation)(y)
        return y.to(x.dtype)

    return wrapper


# torch.compile would keep the shifted inputs for the gradient of the weight.
class _Convolution(torch.autograd.Function):
    """Convolve x [B, C, T] with a weight [C, W]. `positions` [B, T] count from the beginning of a
    token's record, by default of the sample."""

    @staticmethod
    def forward(ctx, x, weight, positions):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight, positions)
        y = x * weight[:, -1:]
        for distance in range(1, weight.shape[1]):
            earlier = F.pad(x, (distance, 0))[..., : x.shape[-1]]
            y = y + _inside(earlier, positions, distance) * weight[:, -1 - distance, None]
        return y

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        x, weight, positions = ctx.saved_tensors
        dx, sums = torch.zeros_like(x), []
        for distance in reversed(range(weight.shape[1])):
            later = F.pad(_inside(dy, positions, distance), (0, distance))[..., distance:]
            dx = dx + later * weight[:, -1 - distance, None]
            sums.append((x * later).sum((0, 2)))
        return dx, torch.stack(sums, 1), None


def _inside(values: torch.Tensor, positions: torch.Tensor | None, distance: int) -> torch.Tensor:
    """Set to 0 the values [B, C, T] of tokens whose record begins within `distance` tokens."""
    if positions is None:
        return values
    return torch.where(positions[:, None] >= distance, values, 0)


def separate_states(compute: Callable[..., Any]) -> Any:
    compute_on_cpu = inspect.unwrap(compute)  # `compute` may call a package for GPUs only

    @functools.wraps(compute)
    def wrapper(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        documents: Documents | None = None,
        output_final_state: bool = False,
        **options: Any,
    ) -> Any:
        """Compute linear attention. g [B, T, heads] are the logarithms of the factors by which the
        state is multiplied before each token."""
        if documents is not None:
            g = torch.where(documents.positions[..., None] == 0, _RESET, g)
        # Fake tensors on the CPU are those of models/hub/trace.py, which measures costs on a GPU.
        if (q.is_cuda or private.is_fake(q)) and not output_final_state:
            return gated_delta_rule(q, k, v, g, beta), None
        function = compute if q.is_cuda else compute_on_cpu
        return function(q, k, v, g, beta, output_final_state=output_final_state, **options)

    return wrapper


# Names of transformers' functions -> functions that return their replacements
_WRAPPERS = {"causal_conv1d_fn": _separate_convolution, _LINEAR_ATTENTION: separate_states}


def probe_options(dtype: torch.dtype) -> dict[str, Any]:
    """Return the options of a model's forward pass on two packed records, for `separates`."""
    documents = Documents(_POSITIONS, mask=mask_documents(_POSITIONS, dtype))
    return {"position_ids": _POSITIONS, "documents": documents}


def draw_values(
    block: nn.Module, x: torch.Tensor, others: tuple[Any, ...], options: dict[str, Any]
) -> tuple[torch.Tensor, tuple[Any, ...], dict[str, Any]]:
    """Give a block random weights. Return random values of its inputs, which are those of a forward
    pass with `probe_options`."""
    others, options = private.tree_map(_draw, (others, options))
    probe = probe_options(torch.float32)
    options |= {name: probe[name] for name in probe.keys() & options.keys()}
    private.replace_parameters(block, _draw_parameter)
    return torch.randn(x.shape), others, options


def separates(
    block: nn.Module, x: torch.Tensor, others: tuple[Any, ...], options: dict[str, Any]
) -> bool:
    """Return whether the first half of a block's tokens does not affect the second. The inputs are
    those of a forward pass with `probe_options`, and need no values. The block's parameters have
    no values afterwards.

    The block, which gets random weights, runs twice. Only the tokens of the first half differ."""
    first_x, others, options = draw_values(block, x, others, options)
    second_x = torch.where(_IS_SECOND[:, None], first_x, torch.randn(x.shape))
    with torch.no_grad():
        first, second = (
            private.tree_leaves(block(value, *others, **options))[0]
            for value in (first_x, second_x)
        )
    private.replace_parameters(block, lambda tensor: tensor.to("meta"))
    change = (first - second).abs().amax(-1)
    largest_in_second = change[..., _IS_SECOND].max()
    return bool(largest_in_second < 1e-3 * change[..., ~_IS_SECOND].max())


def _draw(leaf: Any) -> Any:
    """Return random numbers instead of a fake tensor of numbers, or positions."""
    if isinstance(leaf, Mapping):  # of a class that tree_map does not know
        return {key: private.tree_map(_draw, value) for key, value in leaf.items()}
    if not torch.is_tensor(leaf):
        return leaf
    if leaf.is_complex():
        return torch.randn(leaf.shape, dtype=torch.complex64)
    if leaf.is_floating_point():
        return torch.randn(leaf.shape)
    return _POSITIONS.expand(leaf.shape)


def _draw_parameter(tensor: torch.Tensor) -> torch.Tensor:
    """Return random values of a parameter, so large that all results are of the order of 1. Numbers
    repeat, to save time, and experts are equal, to save memory."""
    is_stack = tensor.dim() > 2 and tensor.shape[1] > 1  # otherwise a convolution
    shape = tensor.shape[1:] if is_stack else tensor.shape
    num_values = shape.numel()
    num_inputs = 1 if tensor.dim() == 1 else num_values // shape[0]
    numbers = torch.randn(min(num_values, 1_000_003)) / num_inputs**0.5
    repeated = numbers.repeat(-(-num_values // len(numbers)))[:num_values]
    return repeated.view(shape).expand(tensor.shape)
