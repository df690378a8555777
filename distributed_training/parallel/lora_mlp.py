"""Compute gated MLPs with LoRA adapters on GPUs.

The layers mlp_in and mlp_out have the base matrices and adapters of models/llama/model.py. Without
this module, the output of mlp_in's adapters is written to memory, read again, and added to the
largest activation of the block. The same happens to the gradient of mlp_out's input. Here, two
Triton kernels instead multiply the adapters' factors in registers while they compute the
activation function or its gradient. The backward kernel also sums the gradients of mlp_in's B and
mlp_out's A. The activation function's result is not kept for the backward pass. For Llama-3.1-8B
with one sample of 4,096 tokens on an H100, the first version of these kernels reduced a step from
278 ms to 263 ms (results/records/h100-unsloth).

In shapes, N is the number of tokens, F the number of units of the MLP, and R the rank."""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from distributed_training.models.decoder import Decoder
from distributed_training.parallel.lora import matrix_gradient, sum_of_linears

# Tokens and units of the kernels' tiles, and warps. Each program computes every n-th tile of
# the same units, so that it can load tiles ahead. About PROGRAMS programs run.
FORWARD, BACKWARD = (64, 64, 8), (64, 32, 4)
PROGRAMS = 8 * 132


def fuse_gated_mlps(model: Decoder, targets: str | None) -> None:
    """Let the blocks that this module supports use it, in place. `targets` are those of the
    adapters, which the model already has (see `Plan.fuses_gated_mlps`)."""
    for index, block in model.blocks.items():
        if model.size.kind_of(int(index)).fused_mlps(targets):
            block.mlp_override = mlp


def mlp(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the output of `block.mlp` for x [B, T, D]."""
    first: Any = block.mlp_in.adapter
    last: Any = block.mlp_out.adapter
    linear: Any = block.mlp_out
    base = getattr(linear, "base", None)
    stored = [linear.weight.to(x.dtype)]
    if base is not None:  # codes and their scales
        stored = [linear.weight, linear.weight_scales]
    first_a, first_b = first.matrices(x.dtype)
    last_a, last_b = last.matrices(x.dtype)
    return _GatedMLP.apply(  # type: ignore[no-any-return]
        block.mlp_in.matmul(x),
        F.linear(x, first_a),
        first_b,
        last_a,
        last_b,
        block.unit_size,
        base,
        *stored,
    )


class _GatedMLP(torch.autograd.Function):
    """Compute the activations, and multiply them by mlp_out's frozen matrix and adapters.

    The activations are not saved. The backward pass computes them again, for the gradient of A."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, y, hidden, b, a, last_b, unit_size, base, *stored
    ):
        act = activate(y, hidden, b, unit_size)
        last_hidden = F.linear(act, a)
        ctx.save_for_backward(y, hidden, b, a, last_b, last_hidden, *stored)
        ctx.unit_size = unit_size
        ctx.base = base
        if base is None:
            return sum_of_linears([act], [*stored], last_hidden, last_b, None)
        return base.product(act, *stored) + F.linear(last_hidden, last_b)

    @staticmethod
    def backward(ctx, d_out):  # type: ignore[no-untyped-def]
        y, hidden, b, a, last_b, last_hidden, *stored = ctx.saved_tensors
        d_last_hidden = d_out @ last_b
        d_last_b = matrix_gradient(d_out, last_hidden)
        if ctx.base is None:
            d_act = d_out @ stored[0]
        else:
            d_act = ctx.base.input_gradient(d_out, *stored)
        d_y, d_b, d_a = activate_backward(d_act, d_last_hidden, a, y, hidden, b, ctx.unit_size)
        return d_y, d_y @ b, d_b, d_a, d_last_b, None, None, *[None] * len(stored)


# These are not `triton_op`s, because torch.compile would see inside them, and copy y (torch 2.11).
@torch.library.custom_op("distributed_training::lora_activate", mutates_args=())
def activate(
    y: torch.Tensor, hidden: torch.Tensor, b: torch.Tensor, unit_size: int
) -> torch.Tensor:
    """Return silu(gate) * up, [.., F], where gate and up are the rows of `y + hidden b^T`.

    `y` [.., 2 F] is the output of the base matrix, `hidden` [.., 2 R] that of A, and `b` [2 F, 2 R]
    is B, expanded as in parallel/lora.py."""
    grid, sizes = _launch(y, hidden, unit_size, *FORWARD)
    act = y.new_empty(*y.shape[:-1], sizes["F"])
    _forward_kernel[grid](y, hidden, b, act, **sizes)
    return act


@torch.library.custom_op("distributed_training::lora_activate_backward", mutates_args=())
def activate_backward(
    d_act: torch.Tensor,
    d_last_hidden: torch.Tensor,
    a: torch.Tensor,
    y: torch.Tensor,
    hidden: torch.Tensor,
    b: torch.Tensor,
    unit_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of `y + hidden b^T`, [.., 2 F], of `b`, and of `a`.

    The gradient of the result of `activate` is `d_act + d_last_hidden a`. `d_act` [.., F] is from
    mlp_out's base matrix. `d_last_hidden` [.., R] is the gradient of the output of mlp_out's A,
    `a` [R, F]."""
    grid, sizes = _launch(y, hidden, unit_size, *BACKWARD)
    d_y = torch.empty_like(y)
    d_b = b.new_empty(grid[1], *b.shape, dtype=torch.float32)
    d_a = b.new_empty(grid[1], *a.shape, dtype=torch.float32)
    _backward_kernel[grid](
        d_act, d_last_hidden.contiguous(), a, y, hidden, b, d_y, d_b, d_a, **sizes
    )
    return d_y, d_b.sum(0).to(b.dtype), d_a.sum(0).to(a.dtype)


@activate.register_fake
def _(y, *_):  # type: ignore[no-untyped-def]
    return y.new_empty(*y.shape[:-1], y.shape[-1] // 2)


@activate_backward.register_fake
def _(_d_act, _d_last_hidden, a, y, _hidden, b, _unit_size):  # type: ignore[no-untyped-def]
    return torch.empty_like(y), torch.empty_like(b), torch.empty_like(a)


def _launch(
    y: torch.Tensor, hidden: torch.Tensor, unit_size: int, rows: int, tile: int, warps: int
) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the numbers of programs and the kernels' sizes."""
    units = y.shape[-1] // 2
    rank = hidden.shape[-1] // 2
    tokens = y.numel() // (2 * units)
    # A product in registers needs at least 16 columns.
    width = max(16, triton.next_power_of_2(rank))
    sizes = {
        "N": tokens,
        "F": units,
        "R": rank,
        "WIDTH": width,
        "UNIT": unit_size,
        "ROWS": rows,
        "TILE": tile,
        "num_warps": warps,
        "STAGES": 3 if width <= 32 else 2,
    }
    columns = units // tile
    num_tiles = triton.cdiv(tokens, rows)
    programs_per_column = min(num_tiles, max(1, round(PROGRAMS / columns)))
    return (columns, programs_per_column), sizes


@triton.jit
def _gate_and_up(  # type: ignore[no-untyped-def]
    y, hidden_tile, b_tile, at, is_token, UNIT: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr
):
    """Compute a tile of gate and up in fp32."""
    both = tl.load(y + at, mask=is_token, other=0.0).to(tl.float32)
    both = tl.dot(hidden_tile, b_tile, both).reshape(ROWS, TILE // UNIT, 2, UNIT)
    gate, up = both.permute(0, 1, 3, 2).split()
    return gate.reshape(ROWS, TILE), up.reshape(ROWS, TILE)


@triton.jit
def _load_factor(  # type: ignore[no-untyped-def]
    factor, rows, N, R: tl.constexpr, WIDTH: tl.constexpr
):
    """Load rows of a matrix [N, R], padded with zeros to [rows, WIDTH]."""
    r = tl.arange(0, WIDTH)[None, :]
    is_loaded = (rows < N)[:, None]
    if R < WIDTH:  # A mask that depends on r makes loads slow.
        is_loaded = is_loaded & (r < R)
    return tl.load(factor + rows[:, None] * R + r, mask=is_loaded, other=0.0)


@triton.jit
def _forward_kernel(  # type: ignore[no-untyped-def]
    y,
    hidden,
    b,
    act,
    N,
    F: tl.constexpr,
    R: tl.constexpr,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    units = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(0) * 2 * TILE + tl.arange(0, 2 * TILE)  # their gate and up in y
    b_tile = _load_factor(b, columns, 2 * F, 2 * R, 2 * WIDTH).trans()
    step = tl.num_programs(1) * ROWS
    for start in tl.range(tl.program_id(1) * ROWS, N, step, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        is_token = (rows < N)[:, None]
        at = rows[:, None].to(tl.int64) * (2 * F) + columns[None, :]
        hidden_tile = _load_factor(hidden, rows, N, 2 * R, 2 * WIDTH)
        gate, up = _gate_and_up(y, hidden_tile, b_tile, at, is_token, UNIT, ROWS, TILE)
        values = (gate * tl.sigmoid(gate) * up).to(act.dtype.element_ty)
        tl.store(act + rows[:, None].to(tl.int64) * F + units[None, :], values, mask=is_token)


@triton.jit
def _backward_kernel(  # type: ignore[no-untyped-def]
    d_act,
    d_last_hidden,
    a,
    y,
    hidden,
    b,
    d_y,
    d_b,
    d_a,
    N,
    F: tl.constexpr,
    R: tl.constexpr,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    units = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(0) * 2 * TILE + tl.arange(0, 2 * TILE)  # their gate and up in y
    b_tile = _load_factor(b, columns, 2 * F, 2 * R, 2 * WIDTH).trans()
    r = tl.arange(0, WIDTH)[:, None]
    a_at = r * F + units[None, :]
    a_tile = tl.load(a + a_at, mask=r < R, other=0.0)
    sum_a = tl.zeros((WIDTH, TILE), tl.float32)
    sum_b = tl.zeros((2 * TILE, 2 * WIDTH), tl.float32)
    dtype = d_y.dtype.element_ty
    step = tl.num_programs(1) * ROWS
    for start in tl.range(tl.program_id(1) * ROWS, N, step, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        is_token = (rows < N)[:, None]
        at = rows[:, None].to(tl.int64) * (2 * F) + columns[None, :]
        hidden_tile = _load_factor(hidden, rows, N, 2 * R, 2 * WIDTH)
        gate, up = _gate_and_up(y, hidden_tile, b_tile, at, is_token, UNIT, ROWS, TILE)
        d_hidden_tile = _load_factor(d_last_hidden, rows, N, R, WIDTH)
        d_at = rows[:, None].to(tl.int64) * F + units[None, :]
        d = tl.load(d_act + d_at, mask=is_token, other=0.0).to(tl.float32)
        d = tl.dot(d_hidden_tile, a_tile, d)
        gate_sigmoid = tl.sigmoid(gate)
        silu = gate * gate_sigmoid
        d_gate = d * up * (gate_sigmoid + silu * (1 - gate_sigmoid))
        both = tl.join(d_gate.to(dtype), (d * silu).to(dtype))
        both = both.reshape(ROWS, TILE // UNIT, UNIT, 2).permute(0, 1, 3, 2)
        both = both.reshape(ROWS, 2 * TILE)
        tl.store(d_y + at, both, mask=is_token)
        sum_a = tl.dot(d_hidden_tile.trans(), (silu * up).to(dtype), sum_a)
        sum_b = tl.dot(both.trans(), hidden_tile, sum_b)
    tl.store(d_a + tl.program_id(1) * (R * F) + a_at, sum_a, mask=r < R)
    r = tl.arange(0, 2 * WIDTH)[None, :]
    b_at = tl.program_id(1) * (4 * F * R) + columns[:, None] * (2 * R) + r
    tl.store(d_b + b_at, sum_b, mask=r < 2 * R)
