"""Store frozen matrices in 4-bit NF4 with one scale per 64 values (QLoRA, arXiv 2305.14314), using
bitsandbytes.

Viewed as bytes, codes have the shape [rows, columns / 2]. Viewed as fp32 numbers, scales have the
shape [rows, columns / 64]."""

from typing import Any

import bitsandbytes  # noqa: F401, registers its operations
import torch
import torch.nn as nn
import torch.nn.functional as F

from distributed_training.models.decoder import Linear

BLOCK_SIZE = 64


class QuantizedLinear(Linear):
    """Linear layer with a frozen matrix in NF4. At each use, the matrix is dequantized to the dtype
    of the input."""

    scales: nn.Parameter

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = nf4_matmul(x, self.weight, self.scales, self.in_features)
        bias = self.cast_bias(x.dtype)
        return y if bias is None else y + bias


# torch.compile must not see inside these two operations. Otherwise, it would share the dequantized
# matrix between the forward and backward passes, and thus keep all dequantized matrices in memory
# until the backward pass.
@torch.library.custom_op("distributed_training::nf4_matmul", mutates_args=())
def nf4_matmul(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, columns: int
) -> torch.Tensor:
    """Return `x W^T`, [..., columns] -> [..., rows]. Only codes and scales are kept for the
    backward pass."""
    return F.linear(x, dequantize(codes, scales, columns, x.dtype))


@torch.library.custom_op("distributed_training::nf4_matmul_backward", mutates_args=())
def nf4_matmul_backward(
    gradient: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, columns: int
) -> torch.Tensor:
    """Return the gradient of x, [..., rows] -> [..., columns]."""
    return gradient @ dequantize(codes, scales, columns, gradient.dtype)


@nf4_matmul.register_fake
def _(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, columns: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], len(codes))


@nf4_matmul_backward.register_fake
def _(
    gradient: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, columns: int
) -> torch.Tensor:
    return gradient.new_empty(*gradient.shape[:-1], columns)


def _keep_codes(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, codes, scales, ctx.columns = inputs
    ctx.save_for_backward(codes, scales)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    codes, scales = ctx.saved_tensors
    return nf4_matmul_backward(gradient, codes, scales, ctx.columns), None, None, None


nf4_matmul.register_autograd(_backward, setup_context=_keep_codes)


def quantize_matrix(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes and scales of a matrix [rows, columns], both viewed as tensors of the
    matrix's dtype."""
    operations: Any = torch.ops.bitsandbytes
    codes, scales = operations.quantize_4bit(values.contiguous(), BLOCK_SIZE, "nf4", torch.uint8)
    rows = len(values)
    return codes.view(rows, -1).view(values.dtype), scales.view(rows, -1).view(values.dtype)


def dequantize_matrix(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the matrix that `quantize_matrix` rounded, in its dtype."""
    return dequantize(codes, scales, 2 * codes.itemsize * codes.shape[1], codes.dtype)


def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the dequantized matrix [rows, columns] in `dtype`."""
    operations: Any = torch.ops.bitsandbytes
    return operations.dequantize_4bit(  # type: ignore[no-any-return]
        codes.view(torch.uint8).view(-1, 1), scales.view(torch.float32).view(-1), BLOCK_SIZE, "nf4",
        [len(codes), columns], dtype,
    )  # fmt: skip
