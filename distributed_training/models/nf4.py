"""Frozen matrices in 4 bits: NF4 with a scale for 64 values (QLoRA, 2305.14314), by bitsandbytes.

Codes and scales are stored as if they were numbers of the compute dtype, so that FSDP, which casts
and gathers floating-point parameters, leaves their bits alone. Row by row, so that it may shard
them: [rows, columns / 2 bytes] and [rows, columns / 64 of fp32]."""

from typing import Any

import bitsandbytes  # noqa: F401, registers its operations
import torch
import torch.nn as nn
import torch.nn.functional as F

from distributed_training.models import ModelSize
from distributed_training.models.decoder import Box, Decoder, Linear, Source, is_block_matrix

BLOCK = 64


class NF4Linear(Linear):
    """A frozen matrix that each use dequantizes to the dtype of its input."""

    scales: nn.Parameter

    def product(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = nf4_product(x, self.weight, self.scales, self.in_features)
        bias = self.own_bias(x.dtype)
        return y if bias is None else y + bias


# Two operations that torch.compile does not look into. It would share the dequantized matrix
# between forward and backward pass, and so keep all matrices of the model from one to the other.
@torch.library.custom_op("distributed_training::nf4_product", mutates_args=())
def nf4_product(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, columns: int
) -> torch.Tensor:
    """x W^T: [..., columns] -> [..., rows]. Keeps codes and scales for the backward pass."""
    return F.linear(x, dequantize(codes, scales, columns, x.dtype))


@torch.library.custom_op("distributed_training::nf4_product_backward", mutates_args=())
def nf4_product_backward(
    gradient: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, columns: int
) -> torch.Tensor:
    """The gradient of x: [..., rows] -> [..., columns]."""
    return gradient @ dequantize(codes, scales, columns, gradient.dtype)


@nf4_product.register_fake
def _(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, columns: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], len(codes))


@nf4_product_backward.register_fake
def _(
    gradient: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, columns: int
) -> torch.Tensor:
    return gradient.new_empty(*gradient.shape[:-1], columns)


def _keep_codes(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, codes, scales, ctx.columns = inputs
    ctx.save_for_backward(codes, scales)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    codes, scales = ctx.saved_tensors
    return nf4_product_backward(gradient, codes, scales, ctx.columns), None, None, None


nf4_product.register_autograd(_backward, setup_context=_keep_codes)


def quantize(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of a matrix [rows, columns], both in its dtype."""
    operations: Any = torch.ops.bitsandbytes
    codes, scales = operations.quantize_4bit(values.contiguous(), BLOCK, "nf4", torch.uint8)
    rows = len(values)
    return tuple(each.view(rows, -1).view(values.dtype) for each in (codes, scales))  # type: ignore[return-value]


def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the matrix [rows, columns]."""
    operations: Any = torch.ops.bitsandbytes
    return operations.dequantize_4bit(  # type: ignore[no-any-return]
        codes.view(torch.uint8).view(-1, 1), scales.view(torch.float32).view(-1), BLOCK, "nf4",
        [len(codes), columns], dtype,
    )  # fmt: skip


def attach_scales(model: Decoder, scales: dict[str, torch.Tensor]) -> None:
    """Let the matrices whose weights are codes use them with their `scales`, in place."""
    for name, values in scales.items():
        linear = model.get_submodule(name.removesuffix(".weight"))
        linear.__class__ = NF4Linear
        linear.scales = nn.Parameter(values, requires_grad=False)


@torch.no_grad()
def replace_by_dequantized(module: nn.Module) -> None:
    """Replace all of a module's matrices in NF4 by their values in the dtype they are used in, in
    place: what training beside them is compared with."""
    for linear in module.modules():
        if isinstance(linear, NF4Linear):
            codes = linear.weight
            values = dequantize(codes, linear.scales, linear.in_features, codes.dtype)
            linear.weight = nn.Parameter(values, requires_grad=False)
            del linear.scales
            linear.__class__ = Linear  # type: ignore[assignment]


def quantize_matrices(model: Decoder, source: Source, device: torch.device) -> None:
    """Put the matrices of a model's blocks on `device` in NF4, one after the other, in place. They
    are rounded to the dtypes of the model's parameters first."""
    scales: dict[str, torch.Tensor] = {}
    for name, parameter in list(model.named_parameters()):
        if is_block_matrix(name, model.size):
            codes, scales[name] = quantize(source(name, ()).to(device).to(parameter.dtype))
            owner, _, last = name.rpartition(".")
            model.get_submodule(owner).register_parameter(last, nn.Parameter(codes))
    attach_scales(model, scales)


def rounded_source(source: Source, size: ModelSize, dtype: torch.dtype) -> Source:
    """Return a source of the values that training with a base in NF4 and a compute `dtype` sees."""

    def read(name: str, box: Box) -> torch.Tensor:
        values = source(name, ())
        if is_block_matrix(name, size):
            codes, scales = quantize(values.to(dtype))
            values = dequantize(codes, scales, values.shape[1], dtype)
        return values[box]

    return read
