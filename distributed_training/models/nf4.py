"""Store frozen matrices in 4-bit NF4 with one scale per 64 values, using bitsandbytes.

QLoRA (arXiv 2305.14314) also quantizes the scales to 8 bits, in blocks that span rows. Here, the
square root of a scale is an integer from 0 to 255 times a step, which is the row's own, because
FSDP shards rows. Thanks to the root, small scales next to large ones are more precise.

Viewed as bytes, codes have the shape [rows, columns / 2]. A row of scales contains the step as an
fp32 number, columns / 64 integers, and padding to a multiple of 4 bytes."""

from typing import Any

import bitsandbytes  # noqa: F401, registers its operations
import torch
import torch.nn.functional as F

BLOCK_SIZE = 64


# torch.compile must not see inside these two operations. Otherwise, it would share the dequantized
# matrix between the forward and backward passes, and thus keep all dequantized matrices in memory
# until the backward pass.
@torch.library.custom_op("distributed_training::nf4_matmul", mutates_args=())
def product(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return `x W^T`, [.., columns] -> [.., rows]."""
    return F.linear(x, dequantize_matrix(codes, scales))


@torch.library.custom_op("distributed_training::nf4_matmul_backward", mutates_args=())
def input_gradient(dy: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return `dy W`, [.., rows] -> [.., columns]."""
    return dy @ dequantize_matrix(codes, scales)


@product.register_fake
def _(x, codes, _scales):  # type: ignore[no-untyped-def]
    return x.new_empty(*x.shape[:-1], len(codes))


@input_gradient.register_fake
def _(dy, codes, _scales):  # type: ignore[no-untyped-def]
    return dy.new_empty(*dy.shape[:-1], _num_columns(codes))


def quantize_matrix(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes and scales of a matrix [rows, columns], both viewed as tensors of the
    matrix's dtype."""
    operations: Any = torch.ops.bitsandbytes
    codes, scales = operations.quantize_4bit(values.contiguous(), BLOCK_SIZE, "nf4", torch.uint8)
    rows = len(values)
    roots = scales.view(rows, -1).sqrt()
    steps = roots.amax(1, keepdim=True) / 255
    # In a row of zeros, the step is 0, and the integers do not matter.
    integers = F.pad((roots / steps).round().to(torch.uint8), (0, -roots.shape[1] % 4))
    packed = torch.cat([steps.view(torch.uint8), integers], 1)
    return codes.view(rows, -1).view(values.dtype), packed.view(values.dtype)


def dequantize_matrix(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the matrix that `quantize_matrix` rounded, in its dtype."""
    operations: Any = torch.ops.bitsandbytes
    columns = _num_columns(codes)
    if codes.is_cuda:
        from distributed_training.models import nf4_kernel  # imports Triton, which only GPUs have

        return nf4_kernel.dequantize_matrix(codes, scales, columns)
    packed = scales.view(torch.uint8)
    integers = packed[:, 4 : 4 + columns // BLOCK_SIZE]
    largest = (integers * packed[:, :4].view(torch.float32)).square().flatten()
    code_bytes = codes.view(torch.uint8).view(-1, 1)
    shape = [len(codes), columns]
    return operations.dequantize_4bit(  # type: ignore[no-any-return]
        code_bytes, largest, BLOCK_SIZE, "nf4", shape, codes.dtype
    )


def _num_columns(codes: torch.Tensor) -> int:
    return 2 * codes.itemsize * codes.shape[1]
