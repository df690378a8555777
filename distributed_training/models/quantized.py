"""Quantize the frozen matrices in a model's blocks to NF4 or fp8.

The module of a format exports `QuantizedLinear`, the layer that computes with the codes and scales
of a matrix, `quantize_matrix`, which returns them, and `dequantize_matrix`. Codes and scales are
viewed as numbers in the compute dtype, so that FSDP's casts do not change their bits. Both have one
row per row of the matrix, so FSDP can shard them by rows."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

from distributed_training.models.decoder import Decoder, Linear, is_block_matrix
from distributed_training.models.initial_weights import Slices, WeightSource
from distributed_training.models.size import ModelSize

SCALES = "_scales"  # end of the name of the scales of a stack of experts' matrices


class QuantizedLinear(Linear):
    """Linear layer with a frozen quantized matrix W."""

    scales: nn.Parameter
    multiply: Callable[..., torch.Tensor]  # (x, codes, scales) -> x W^T

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        y = self.multiply(x, self.weight, self.scales)
        bias = self.cast_bias(x.dtype)
        return y if bias is None else y + bias


def load_format(base_dtype: str) -> Any:
    """Return the module of the format `base_dtype`. NF4 imports bitsandbytes."""
    return importlib.import_module(f"distributed_training.models.{base_dtype}")


def quantize_matrices(
    model: Decoder,
    source: WeightSource,
    device: torch.device,
    base_dtype: str,
) -> WeightSource:
    """Convert the matrices in the blocks of a model on the meta device to `base_dtype`, in place.
    Given a `source` of the original parameters, return a source of the converted parameters, which
    quantizes matrices on `device`. Each matrix is first rounded to the dtype of the parameter that
    it replaces. Stacks of experts' matrices get scales beside them."""
    quantized = load_format(base_dtype)
    dtypes = {}
    for name, parameter in list(model.named_parameters()):
        if is_block_matrix(name, model.size):
            layer_name = name.removesuffix(".weight")
            dtypes[layer_name] = parameter.dtype
            linear = model.get_submodule(layer_name)
            linear.__class__ = quantized.QuantizedLinear
            codes, scales = quantized.quantize_matrix(parameter.detach())
            linear.weight, linear.scales = nn.Parameter(codes), nn.Parameter(scales)
        elif _is_stack(name, model.size):
            dtypes[name] = parameter.dtype
            owner_name, _, key = name.rpartition(".")
            owner: Any = model.get_submodule(owner_name)
            codes, scales = _quantize_stack(quantized, name, parameter.detach(), model.size)
            owner.register_parameter(key, nn.Parameter(codes))
            owner.register_parameter(f"{key}{SCALES}", nn.Parameter(scales))
            owner.base_dtype = base_dtype

    def read(name: str, slices: Slices) -> torch.Tensor:
        stack = name.removesuffix(SCALES)
        if stack in dtypes:
            values = source(stack, slices[:1]).to(device).to(dtypes[stack])
            codes, scales = _quantize_stack(quantized, stack, values, model.size)
            columns = (slice(None), *slices[1:])
            return (codes if name == stack else scales)[columns]
        layer_name, _, key = name.rpartition(".")
        if key == "bias" or layer_name not in dtypes:
            return source(name, slices)
        # A scale depends on a whole row, even if this rank stores only some of the columns.
        values = source(f"{layer_name}.weight", slices[:1]).to(device).to(dtypes[layer_name])
        codes, scales = quantized.quantize_matrix(values)
        columns = (slice(None), *slices[1:])
        return (scales if key == "scales" else codes)[columns]

    return read


def _is_stack(name: str, size: ModelSize) -> bool:
    """Return whether the parameter `name` is a stack of experts' matrices in a block."""
    if not name.startswith("blocks."):
        return False
    _, layer, stack = name.split(".", 2)
    return stack in size.kind_of(int(layer)).stacks


def _transposes(name: str, size: ModelSize) -> bool:
    """Return whether the stack `name` is stored as [experts, in, out]."""
    return size.kind_of(int(name.split(".")[1])).transposes_stacks


def _quantize_stack(
    quantized: Any,
    name: str,
    values: torch.Tensor,
    size: ModelSize,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes and scales of a stack's matrices [out, in], each [experts, out, ..]."""
    if _transposes(name, size):
        values = values.transpose(1, 2)
    shape = values.shape[:2]
    return tuple(
        part.unflatten(0, shape) for part in quantized.quantize_matrix(values.flatten(0, 1))
    )


def dequantized_source(
    source: WeightSource,
    size: ModelSize,
    base_dtype: str,
    dtype: torch.dtype,
) -> WeightSource:
    """Return a source of the weights that training uses if the base model is quantized to
    `base_dtype` and the compute dtype is `dtype`."""
    quantized = load_format(base_dtype)

    def read(name: str, slices: Slices) -> torch.Tensor:
        values = source(name, ())
        if is_block_matrix(name, size):
            codes, scales = quantized.quantize_matrix(values.to(dtype))
            values = quantized.dequantize_matrix(codes, scales)
        elif _is_stack(name, size):
            codes, scales = _quantize_stack(quantized, name, values.to(dtype), size)
            matrix = quantized.dequantize_matrix(codes.flatten(0, 1), scales.flatten(0, 1))
            values = matrix.unflatten(0, codes.shape[:2])
            values = values.transpose(1, 2) if _transposes(name, size) else values
        return values[slices]

    return read
