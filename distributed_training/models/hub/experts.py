"""Compute a mixture's experts as grouped products, through transformers' ExpertsInterface.

Each of the N tokens has k experts. The S = N k pairs of tokens and experts are sorted by expert, so
that each expert multiplies consecutive rows. No token is dropped, and all shapes are static. A
stack contains one matrix for each of the E experts, [E, out, in], or [E, in, out] if transformers
stores it transposed.

The weight of an expert's output is applied before the last product, so that the gradient of the
router needs no output of the experts. For the backward pass, only the output of the first product
is kept: rows are gathered again, and element-wise operations are computed again.

With expert parallelism (parallel/experts.py), E is the number of this rank's experts and N that of
the rows it received. Pairs with other ranks' experts are sorted behind all others, and most of them
have no row. The rows of others are 0 in the result and in all gradients."""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from distributed_training.models import private, quantized

STACKS = {"gate_up_proj", "up_proj", "down_proj"}  # names of stacks in modules of transformers


def experts(
    module: Any, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of the outputs of each token's experts, for x [N, D]. The indices of
    the experts, `chosen`, and their `weights` have the shape [N, k]."""
    exchange = getattr(module, "token_exchange", None)
    num_experts = module.num_experts
    if exchange is not None:
        if module.training:
            own_ids = chosen.flatten().sort().values
            module.latest_ends.copy_(_row_ends(own_ids, num_experts))
        x, weights, chosen, route = exchange.send(x, weights, chosen, may_repeat=module.training)
        num_experts = exchange.num_experts
    ids, order = chosen.flatten().sort(stable=True)
    ends = _row_ends(ids, num_experts)
    num_rows = len(order)
    if exchange is not None and module.training and route is None:
        num_rows = exchange.limit_rows(ends, num_rows)
        ids, order = ids[:num_rows], order[:num_rows]
        ends = ends.clamp(max=num_rows)
    # Rows of each token, [N, k]. A row that was left out is 0, as the last one.
    places = torch.full_like(chosen.flatten(), num_rows - 1)
    places[order] = torch.arange(num_rows, device=x.device)
    if module.training and exchange is None:
        module.latest_ends.copy_(ends)
    places = places.view_as(chosen)
    tokens = order // chosen.shape[1]  # of each row, [S]
    # The gradient is a scatter, which is exact because no index occurs twice.
    scales = weights.flatten().gather(0, order)[:, None]
    if exchange is not None:
        scales = torch.where((ids < num_experts)[:, None], scales, 0)
        ids = ids.clamp(max=num_experts - 1)
    first = "gate_up_proj" if module.has_gate else "up_proj"
    hidden = multiply(module, first, x, ends, tokens, places)
    if module.has_bias:
        hidden = hidden + private.local_part(getattr(module, f"{first}_bias"))[ids]
    hidden = private.apply_gate(module, hidden) if module.has_gate else module.act_fn(hidden)
    if not module.has_post_expert_norm:
        hidden = (hidden * scales).to(x.dtype)
    y = multiply(module, "down_proj", hidden, ends)
    if module.has_bias:
        y = y + private.local_part(module.down_proj_bias)[ids] * scales
    if module.has_post_expert_norm:
        y = module.post_expert_norm(y) * scales
    y = CombineRows.apply(y, tokens, places).to(x.dtype)
    return y if exchange is None else exchange.receive(y, route)


def _row_ends(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return the number of rows up to the end of each expert's rows, int32 [E], for sorted ids."""
    numbers = torch.arange(num_experts, device=ids.device)
    return torch.searchsorted(ids, numbers, right=True).to(torch.int32)


def multiply(
    module: Any,
    name: str,
    x: torch.Tensor,
    ends: torch.Tensor,
    tokens: torch.Tensor | None = None,
    places: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the products of the rows [S, in] of x with the stack `name` of a module, plus those of
    its adapter, [S, out]. With `tokens` and `places`, x [N, in] contains the rows of tokens
    instead."""
    adapter = getattr(module, f"{name}_adapter", None)
    a, b = (None, None) if adapter is None else adapter.matrices(x)
    stack = private.local_part(getattr(module, name))
    scales = getattr(module, f"{name}{quantized.SCALES}", None)
    if scales is not None:
        scales = private.local_part(scales)
    elif module.is_transposed:
        stack = stack.transpose(1, 2)
    base_dtype = getattr(module, "base_dtype", "")
    is_partial = getattr(module, "token_exchange", None) is not None
    y, _ = expert_linear(x, stack, ends, tokens, places, a, b, scales, base_dtype, is_partial)
    return y


def _multiply_rows(
    rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor, is_partial: bool
) -> torch.Tensor:
    """Return the product of each expert's rows with its matrix, [S, in] and [E, in, out] -> [S,
    out]. If they are only a part of the rows, the others become 0: the kernel does not write
    them."""
    y = F.grouped_mm(rows, matrices, offs=ends)
    if is_partial:
        is_other = torch.arange(len(y), device=y.device) >= ends[-1]
        y.masked_fill_(is_other[:, None], 0)
    return y


def _combine(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the sum over the rows of each token, [S, ..] -> [N, ..]."""
    return rows[places.flatten()].unflatten(0, places.shape).sum(1)


# Without this function, gradients would be added with slow atomic operations.
class CombineRows(torch.autograd.Function):
    """Return the sum over the rows of each token, [S, ..] -> [N, ..]."""

    @staticmethod
    def forward(ctx, rows, tokens, places):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(tokens)
        return _combine(rows, places)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        return dy[ctx.saved_tensors[0]], None, None


class SpreadTokens(torch.autograd.Function):
    """Return the rows of `tokens`, [N, ..] -> [S, ..]. Rows that are not in `places` have no
    gradient."""

    @staticmethod
    def forward(ctx, x, tokens, places):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(places)
        return x[tokens]

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        return _combine(dy, ctx.saved_tensors[0]), None, None


# torch.compile must not see inside these operations: its own rules for grouped products refuse fp32
# and some strides, and it would keep gathered rows and dequantized stacks for the backward pass.
@torch.library.custom_op("distributed_training::expert_linear", mutates_args=())
def expert_linear(
    x: torch.Tensor,
    stack: torch.Tensor,
    ends: torch.Tensor,
    tokens: torch.Tensor | None,
    places: torch.Tensor | None,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    scales: torch.Tensor | None,
    base_dtype: str,
    is_partial: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (products, the products of the rows with the adapter's a [E, R, in], which have no
    gradient). `stack` [E, out, ..] contains codes of the quantization `base_dtype` if there are
    `scales`. `is_partial` says whether there may be rows of other ranks' experts."""
    rows = x if tokens is None else x[tokens]
    matrices = _dequantize(stack, scales, base_dtype)
    y = _multiply_rows(rows, matrices.transpose(1, 2), ends, is_partial)
    if a is None or b is None:
        return y, x.new_empty(0)
    hidden = _multiply_rows(rows, a.transpose(1, 2), ends, is_partial)
    return y.add_(_multiply_rows(hidden, b.transpose(1, 2), ends, is_partial)), hidden


@torch.library.custom_op("distributed_training::expert_rows_gradient", mutates_args=())
def _rows_gradient(
    dy: torch.Tensor,
    stack: torch.Tensor,
    ends: torch.Tensor,
    scales: torch.Tensor | None,
    base_dtype: str,
    num_inputs: int,
    is_partial: bool,
) -> torch.Tensor:
    """Return the gradient of rows [S, in] from that of their products with a stack."""
    return _multiply_rows(dy, _dequantize(stack, scales, base_dtype), ends, is_partial)


@torch.library.custom_op("distributed_training::expert_stack_gradient", mutates_args=())
def _stack_gradient(
    dy: torch.Tensor, x: torch.Tensor, tokens: torch.Tensor | None, ends: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of a stack, [E, out, in]. It is 0 for experts without rows."""
    rows = x if tokens is None else x[tokens]
    return F.grouped_mm(dy.t(), rows, offs=ends)


def _dequantize(stack: torch.Tensor, scales: torch.Tensor | None, base_dtype: str) -> torch.Tensor:
    """Return the matrices [E, out, in] of a stack."""
    if scales is None:
        return stack
    return quantized.dequantize(stack, scales, base_dtype).to(stack.dtype)


@expert_linear.register_fake
def _(x, stack, ends, tokens, places, a, *_):  # type: ignore[no-untyped-def]
    num_rows = len(x if tokens is None else tokens)
    hidden_shape = [0] if a is None else [num_rows, a.shape[1]]
    return x.new_empty(num_rows, stack.shape[1]), x.new_empty(hidden_shape)


@_rows_gradient.register_fake
def _(dy, stack, ends, scales, base_dtype, num_inputs, _):  # type: ignore[no-untyped-def]
    return dy.new_empty(len(dy), num_inputs)


@_stack_gradient.register_fake
def _(dy, x, tokens, ends):  # type: ignore[no-untyped-def]
    return dy.new_empty(len(ends), dy.shape[1], x.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, stack, ends, tokens, places, a, b, scales, ctx.base_dtype, ctx.is_partial = inputs
    ctx.num_inputs = x.shape[1]
    needs_rows = a is not None or ctx.needs_input_grad[1]
    kept_x = x if needs_rows else None
    ctx.save_for_backward(kept_x, stack, ends, tokens, places, a, b, scales, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dy: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    x, stack, ends, tokens, places, a, b, scales, hidden = ctx.saved_tensors
    d_stack = d_a = d_b = None
    if ctx.needs_input_grad[1]:
        d_stack = _stack_gradient(dy, x, tokens, ends)
    counts = ctx.num_inputs, ctx.is_partial
    dx = _rows_gradient(dy, stack, ends, scales, ctx.base_dtype, *counts)
    if a is not None:
        d_hidden = _rows_gradient(dy, b, ends, None, "", b.shape[2], ctx.is_partial)
        dx = dx + _rows_gradient(d_hidden, a, ends, None, "", *counts)
        d_a = _stack_gradient(d_hidden, x, tokens, ends)
        d_b = _stack_gradient(dy, hidden, None, ends)
    if places is not None:
        dx = _combine(dx, places)
    return dx, d_stack, None, None, None, d_a, d_b, None, None, None


expert_linear.register_autograd(_backward, setup_context=_save)


@private.flop_formula(torch.ops.distributed_training.expert_linear)
def _(x_shape: Any, stack_shape: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    num_rows, num_outputs = out_shape[0]
    return int(2 * num_rows * num_outputs * x_shape[1])


class StackAdapter(nn.Module):
    """LoRA adapters of the matrices in a stack: a [E, R, in] and b [E, out, R]."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.a = nn.Parameter(a)
        self.b = nn.Parameter(b)
        self.scale = scale

    def matrices(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a, times the adapters' scale, and b in the dtype of `x`. Zeros are appended,
        because the rows of operands must begin at multiples of 16 bytes."""
        padding = -self.a.shape[1] % 8
        a, b = (private.local_part(matrix).to(x.dtype) for matrix in (self.a, self.b))
        return F.pad(a * self.scale, (0, 0, 0, padding)), F.pad(b, (0, padding))
