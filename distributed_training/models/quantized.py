"""Quantize the frozen matrices in a model's blocks to NF4 or fp8.

The module of a format exports `product` and `input_gradient`, which compute with the codes and
scales of a matrix, `quantize_matrix`, which returns them, and `dequantize_matrix`. Codes and scales
are viewed as numbers in the compute dtype, so that FSDP's casts do not change their bits. Both have
one row per row of the matrix, so FSDP can shard them by rows. A stack of experts' matrices is
quantized as one matrix with the rows of all experts."""

import importlib
from typing import Any

import torch
import torch.nn as nn

from distributed_training.models.decoder import Decoder, Linear, is_block_matrix
from distributed_training.models.initial_weights import Slices, WeightSource
from distributed_training.models.size import ModelSize

SCALES = "_scales"  # end of the name of the parameter with the scales of a matrix or of a stack


class Multiply(torch.autograd.Function):
    """Multiply x [.., columns] by a matrix. Only its codes and scales are kept."""

    @staticmethod
    def forward(ctx, x, codes, scales, base):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(codes, scales)
        ctx.base = base
        return base.product(x, codes, scales)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        return ctx.base.input_gradient(dy, *ctx.saved_tensors), None, None, None


class QuantizedLinear(Linear):
    """Linear layer with a frozen quantized matrix W."""

    weight_scales: nn.Parameter
    base: Any  # the module of the format

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        y = Multiply.apply(x, self.weight, self.weight_scales, self.base)
        bias = self.cast_bias(x)
        return y if bias is None else y + bias


def adds_to_product(linear: Any) -> bool:
    """Return whether a product with the matrix of a Linear can be added to other values, because
    the GPU multiplies in the compute dtype."""
    return type(linear) is Linear or getattr(linear, "base_dtype", None) == "nf4"


def stored_matrix(linear: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the matrix of a Linear in `dtype`, or its codes and scales."""
    if isinstance(linear, QuantizedLinear):
        return [linear.weight, linear.weight_scales]
    return [linear.weight.to(dtype)]


def load_format(base_dtype: str) -> Any:
    """Return the module of the format `base_dtype`. NF4 imports bitsandbytes."""
    return importlib.import_module(f"distributed_training.models.{base_dtype}")


def quantize_matrices(
    model: Decoder, source: WeightSource, device: torch.device, base_dtype: str
) -> WeightSource:
    """Convert the matrices in the blocks of a model on the meta device to `base_dtype`, in place.
    Given a `source` of the original parameters, return a source of the converted parameters, which
    quantizes matrices on `device`. Each matrix is first rounded to the dtype of the parameter that
    it replaces. Scales become parameters beside the codes."""
    dtypes = {}
    for name, parameter in list(model.named_parameters()):
        if not is_block_matrix(name, model.size):
            continue
        dtypes[name] = parameter.dtype
        owner_name, _, key = name.rpartition(".")
        owner: Any = model.get_submodule(owner_name)
        if isinstance(owner, Linear):
            owner.__class__ = QuantizedLinear
            owner.base = load_format(base_dtype)
        owner.base_dtype = base_dtype
        codes, scales = _quantize(name, parameter.detach(), model.size, base_dtype)
        owner.register_parameter(key, nn.Parameter(codes))
        owner.register_parameter(f"{key}{SCALES}", nn.Parameter(scales))

    def read(name: str, slices: Slices) -> torch.Tensor:
        matrix = name.removesuffix(SCALES)
        if matrix not in dtypes:
            return source(name, slices)
        # A scale depends on a whole row, even if this rank stores only some of the columns.
        values = source(matrix, slices[:1]).to(device).to(dtypes[matrix])
        codes, scales = _quantize(matrix, values, model.size, base_dtype)
        columns = (slice(None), *slices[1:])
        return (codes if name == matrix else scales)[columns]

    return read


def _transposes(name: str, size: ModelSize) -> bool:
    """Return whether the matrices of the parameter `name` are stored as [in, out]."""
    _, layer, matrix = name.split(".", 2)
    kind = size.kind_of(int(layer))
    return matrix in kind.stacks and kind.transposes_stacks


def _quantize(
    name: str, values: torch.Tensor, size: ModelSize, base_dtype: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes and scales of the parameter `name` with matrices [out, in]: [.., out, ..]
    for a parameter with the shape [.., out, in]."""
    if _transposes(name, size):
        values = values.mT
    codes, scales = load_format(base_dtype).quantize_matrix(values.flatten(0, -2))
    rows = values.shape[:-1]
    return codes.unflatten(0, rows), scales.unflatten(0, rows)


def dequantized_source(
    source: WeightSource, size: ModelSize, base_dtype: str, dtype: torch.dtype
) -> WeightSource:
    """Return a source of the weights that training uses if the base model is quantized to
    `base_dtype` and the compute dtype is `dtype`."""

    def read(name: str, slices: Slices) -> torch.Tensor:
        values = source(name, ())
        if is_block_matrix(name, size):
            codes, scales = _quantize(name, values.to(dtype), size, base_dtype)
            values = dequantize(codes, scales, base_dtype)
            if _transposes(name, size):
                values = values.mT
        return values[slices]

    return read


def dequantize(codes: torch.Tensor, scales: torch.Tensor, base_dtype: str) -> torch.Tensor:
    """Return the matrices [.., out, in] that codes and scales [.., out, ..] represent."""
    rows = codes.shape[:-1]
    last = len(rows) - 1
    matrix = load_format(base_dtype).dequantize_matrix(
        codes.flatten(0, last), scales.flatten(0, last)
    )
    return matrix.unflatten(0, rows)  # type: ignore[no-any-return]
