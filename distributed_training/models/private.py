"""Wrap the private interfaces of torch and transformers that models use. The interfaces that only
parallel/ and engines/ use are wrapped in parallel/private.py.

All interfaces were checked against torch 2.14 and 2.15, and against transformers 5."""

import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed._functional_collectives as functional_collectives
import torch.nn as nn
import torch.nn.functional as F
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor  # noqa: F401
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: F401
from torch.utils._pytree import tree_leaves, tree_map  # noqa: F401

MapTensor = Callable[[torch.Tensor], torch.Tensor]
scaled_mm = torch._scaled_mm  # multiplies matrices in fp8
grouped_mm = torch.ops.aten._grouped_mm  # multiplies rows by the matrices of their groups
# Attention's kernels and their backward passes, which return and take logarithms of sums
cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cpu_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# Collective that torch.compile can capture. Its arguments are (tensor, dimension, group).
all_gather_functional = functional_collectives.all_gather_tensor


_flop_formulas: dict[Any, Callable[..., int]] = {}  # operation -> formula, until it is registered


def flop_formula(operation: Any) -> Callable[[Callable[..., int]], None]:
    """Decorate the function that computes an operation's FLOPs from the shapes of its arguments."""

    def remember(formula: Callable[..., int]) -> None:
        _flop_formulas[operation] = formula

    return remember


def register_flop_formulas() -> None:
    """Tell torch.compile what operations of this package cost. It computes operations again that
    seem to cost nothing. Torch's registry imports Triton, which takes 0.1 s."""
    from torch.utils.flop_counter import register_flop_formula

    while _flop_formulas:
        operation, formula = _flop_formulas.popitem()
        register_flop_formula(operation)(formula)


def varlen_attention() -> Any:
    """Return the kernel on GPUs, which torch.nn.attention.varlen registers."""
    return torch.ops.torch_attn._varlen_attn


def varlen_attention_backward() -> Any:
    """Return the backward pass of the kernel on GPUs."""
    return torch.ops.torch_attn._varlen_attn_backward


def locate_local(parameter: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return this rank's shard of a parameter, without copying it, and the shard's first index."""
    values = parameter.detach()
    if not isinstance(values, DTensor):
        return values, (0,) * values.dim()
    _, start = compute_local_shape_and_global_offset(
        values.shape, values.device_mesh, values.placements
    )
    return values.to_local(), tuple(start)


class MovedModule(nn.Module):
    """Module whose method `move` receives the functions that methods such as `to` and `cuda` apply
    to each tensor. A subclass may apply other functions."""

    def move(self, function: MapTensor, recurse: bool) -> None:
        super()._apply(function, recurse)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.move(fn, recurse)
        return self


def replace_parameters(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace each parameter of a module with the result of `function`. Parameters that are shared
    stay shared."""
    replaced: dict[int, nn.Parameter] = {}
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            if id(parameter) not in replaced:
                replaced[id(parameter)] = nn.Parameter(function(parameter))
            child._parameters[name] = replaced[id(parameter)]


def stored_parameter(module: nn.Module, name: str) -> Any:
    """Return the parameter or buffer that a module stores under a name, or None. A property of the
    module may have the same name."""
    return module._parameters.get(name, module._buffers.get(name))


def local_part(tensor: Any) -> torch.Tensor:
    """Return this rank's shard of a DTensor without copying it. Return other tensors
    unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def store_parameter(module: nn.Module, name: str, value: Any) -> None:
    """Store a parameter, or a tensor in its place, under a name that may also be a property."""
    module._parameters[name] = value


def uses_attention(config: Any, name: str) -> bool:
    """Return whether a model of transformers calls the attention that is registered as `name`."""
    return config._attn_implementation == name  # type: ignore[no-any-return]


def copy_with_unset_parameters(module: nn.Module, shapes: Mapping[str, torch.Size]) -> Any:
    """Return a shallow copy of a module with its own fp32 parameters of the given shapes, whose
    values are NaN. `copy.copy` would call the constructor of a class that FSDP made."""
    module_copy = object.__new__(type(module))
    module_copy.__dict__ = module.__dict__.copy()
    module_copy._parameters = dict.fromkeys(module._parameters)
    for name, shape in shapes.items():
        module_copy._parameters[name] = nn.Parameter(torch.full(shape, torch.nan))
    return module_copy


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no values, while Python code runs on it. While torch.compile
    reads the code, tensors count as real."""
    return isinstance(tensor, FakeTensor)


def is_fused_attention(operation: Any) -> bool:
    """Return whether an operation is a kernel of scaled_dot_product_attention."""
    return "_scaled_dot_product" in str(operation)


class FakeTensorMode(fake_tensor.FakeTensorMode):
    """Torch's mode, without its search for a GPU before each operation."""

    avoid_device_init = True


class FusedAttention(TorchFunctionMode):
    """Mode in which attention whose values are narrower than its keys is one operation, as on
    GPUs. Its arguments must be fake tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        is_attention = func is F.scaled_dot_product_attention and options.get("attn_mask") is None
        if is_attention and args[1].shape[-1] > args[2].shape[-1]:
            return torch.ops.aten._scaled_dot_product_efficient_attention(*args, None, True)[0]
        return func(*args, **options)


def build_hub_model(model_class: Any, config: Any, dtype: torch.dtype, name: str) -> Any:
    """Build a transformers model. It uses the functions for attention and experts that are
    registered under `name`, if its code calls registered functions."""
    options: dict[str, Any] = {"attn_implementation": None}
    if hasattr(sys.modules[model_class.__module__], "ALL_ATTENTION_FUNCTIONS"):
        options["attn_implementation"] = name
    if model_class._can_set_experts_implementation():
        options["experts_implementation"] = name
    return model_class._from_config(config, dtype=dtype, **options)


def apply_gate(experts: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the input of the second product of transformers' gated experts."""
    return experts._apply_gate(x)  # type: ignore[no-any-return]


# Ends of the names that PEFT 0.21 takes for the parts of transformers' stacks of experts, by the
# type whose files have these parts
_EXPERT_TARGETS = {
    "mixtral": (".gate", ".w1", ".w2", ".w3"),
    "qwen2_moe": (".gate", ".gate_proj", ".up_proj", ".down_proj"),
}


def peft_expert_targets(model_type: str) -> tuple[str, ...]:
    """Return the ends of those `target_modules` that PEFT replaces, in a model of a type, by the
    stacks of its experts. If there are any, PEFT also reads adapters of single experts."""
    from transformers.conversion_mapping import _MODEL_TO_CONVERSION_PATTERN

    file_types = {**_MODEL_TO_CONVERSION_PATTERN, "mixtral": "mixtral"}
    return _EXPERT_TARGETS.get(file_types.get(model_type, ""), ())


def decode_floats(document: dict[str, Any]) -> dict[str, Any]:
    """Return a config in which transformers' form of infinite numbers is replaced by numbers."""
    from transformers import PretrainedConfig

    return PretrainedConfig._decode_special_floats(document)  # type: ignore[no-any-return]


def initialize(net: Any, module: nn.Module) -> None:
    """Initialize the parameters and buffers of one module as the transformers model `net` does."""
    net._init_weights(module)


def initialize_buffers(net: Any) -> None:
    """Initialize the buffers of a transformers model whose parameters have no values yet."""
    parameters: list[Any] = [*net.parameters()]
    for parameter in parameters:
        parameter._is_hf_initialized = True  # Drawing a parameter without values takes 1 ms.
    _initialize_all(net, net)
    for parameter in parameters:
        del parameter._is_hf_initialized


def _initialize_all(owner: Any, module: nn.Module) -> None:
    """Initialize a module and the modules in it, as the innermost transformers model around each of
    them does. `owner` is the innermost model around `module`."""
    for child in module.children():
        _initialize_all(child if hasattr(child, "_init_weights") else owner, child)
    initialize(owner, module)


def is_ignored(net: Any, name: str) -> bool:
    """Return whether the transformers model `net` ignores a tensor `name` in weight files."""
    return any(re.search(pattern, name) for pattern in net._keys_to_ignore_on_load_unexpected)
