"""Store frozen matrices in fp8 (e4m3) with one scale per row, and multiply by them in fp8.

A matrix W [rows, columns] is stored once, as codes and scales with `W = scales[:, None] * codes`.
The other operand of a product is quantized when it is needed, with one scale per token:

- Forward: `y = x W^T` sums over columns, so the scales of W can be applied to the result.
- Backward: `dx = dy W` sums over rows, and each row has a different scale. dy is therefore
  multiplied by the scales of W before it is quantized, and the product uses only the codes.

GPUs multiply fp8 matrices only if both operands are contiguous along the summed dimension, so the
backward pass transposes the codes of one matrix at a time.

Scales are rounded to the compute dtype before the codes are computed."""

import torch

from distributed_training.models.private import scaled_mm

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # largest e4m3 number


def product(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return `x W^T`, [.., columns] -> [.., rows]."""
    y = fp8_matmul(*quantize(x.flatten(0, -2)), codes, scales)
    return y.view(*x.shape[:-1], -1)


def input_gradient(dy: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return `dy W`, [.., rows] -> [.., columns]."""
    scaled = dy.flatten(0, -2).float() * scales.float()
    dx = fp8_matmul(*quantize(scaled), codes)
    return dx.view(*dy.shape[:-1], -1)


def quantize(
    x: torch.Tensor, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix in e4m3, and its scales [rows, 1] in `dtype`. torch.compile fuses this
    function with the operation before it."""
    largest = x.abs().amax(-1, keepdim=True).float()
    smallest = torch.finfo(dtype).tiny
    scales = (largest / LARGEST).to(dtype).clamp(min=smallest)
    codes = x.float() / scales.float()
    return codes.to(E4M3), scales


# torch.compile must not see the views and the transposed matrix, which it could keep from the
# forward pass.
@torch.library.custom_op(
    "distributed_training::fp8_matmul",
    mutates_args=(),
    schema="(Tensor x, Tensor x_scales, Tensor codes, Tensor? scales=None) -> Tensor",
)
def fp8_matmul(x, x_scales, codes, scales=None):  # type: ignore[no-untyped-def]
    """Multiply x [tokens, columns], which is in e4m3, by the rows of a matrix. Without `scales`,
    multiply x [tokens, rows] by the columns of its codes. Return the result in the dtype of
    `codes`."""
    w = codes.view(E4M3)
    if scales is None:
        w = _transpose(w)
        scales = x_scales.new_ones(len(w))
    result = scaled_mm(
        x,
        w.t(),
        scale_a=x_scales,
        scale_b=scales.float().view(1, -1),
        # With a scale per row, GPUs only write bf16.
        out_dtype=torch.bfloat16 if x.is_cuda else codes.dtype,
        use_fast_accum=x.is_cuda,
    )
    return result.to(codes.dtype)


@fp8_matmul.register_fake
def _(x, x_scales, codes, scales=None):  # type: ignore[no-untyped-def]
    columns = codes.shape[1] * codes.itemsize if scales is None else len(codes)
    return codes.new_empty(len(x), columns)


def _transpose(codes: torch.Tensor) -> torch.Tensor:
    """Return a contiguous transposed copy of an e4m3 matrix."""
    if not codes.is_cuda:
        return codes.t().contiguous()
    # Imports Triton, which only GPUs have
    from distributed_training.models.transpose import transpose_bytes

    return transpose_bytes(codes.view(torch.uint8)).view(E4M3)


def quantize_matrix(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes and scales of a matrix [rows, columns], both viewed as tensors of the
    matrix's dtype."""
    codes, scales = quantize(values.contiguous(), values.dtype)  # GPT-2's files have columns first
    return codes.view(values.dtype), scales[:, 0]


def dequantize_matrix(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the matrix that codes and scales represent, in fp32."""
    return codes.view(E4M3).float() * scales.float()[:, None]
