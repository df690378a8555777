"""Dequantize the matrices of nf4.py on GPUs, in one pass over the output.

bitsandbytes' kernel needs the scales in fp32, which takes further passes, and reaches about half of
an H200's memory bandwidth."""

import functools

import torch
import triton
import triton.language as tl
from bitsandbytes.functional import get_4bit_type

BLOCKS = 32  # quantization blocks that one program dequantizes


@functools.cache
def _values(device: torch.device) -> torch.Tensor:
    """Return the 16 values of NF4, fp32."""
    return get_4bit_type("nf4", device=device)  # type: ignore[no-any-return]


def dequantize_matrix(codes: torch.Tensor, scales: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the matrix [rows, columns] with these codes and scales, in their dtype."""
    matrix = codes.new_empty(len(codes), columns)
    num_blocks = matrix.numel() // 64
    integers, steps = scales.view(torch.uint8), scales.view(torch.float32)
    _kernel[(triton.cdiv(num_blocks, BLOCKS),)](
        codes.view(torch.uint8), integers, steps, _values(codes.device), matrix,
        num_blocks, steps.shape[1], columns // 64, BLOCKS,
    )  # fmt: skip
    return matrix


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    codes, integers, steps, values, matrix, num_blocks, scale_stride,
    PER_ROW: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    exists = block < num_blocks
    row = block // PER_ROW
    step = tl.load(steps + row * scale_stride, exists)
    integer = tl.load(integers + (row * scale_stride + 1) * 4 + block % PER_ROW, exists)
    root = integer.to(tl.float32) * step
    scale = (root * root)[:, None]
    pairs = tl.load(codes + block[:, None] * 32 + tl.arange(0, 32), exists[:, None])
    first = tl.load(values + (pairs >> 4)) * scale
    second = tl.load(values + (pairs & 15)) * scale
    places = block[:, None] * 64 + tl.arange(0, 64)
    result = tl.interleave(first, second).to(matrix.dtype.element_ty)
    tl.store(matrix + places, result, exists[:, None])
