"""Split the backward pass into two parts, so that the second part can fill idle time in a pipeline
(arXiv 2401.10241).

The first part computes the gradients that the previous stage waits for. The second part computes
the gradients of the blocks' matrices. Autograd cannot stop in the middle of a compiled block, so
the matrices are hidden from autograd. Each matrix multiplication x W^T has a tap, which is an extra
input whose gradient is dY, the gradient of the output. The second part computes dW = dY^T x from
the saved x and dY. Together, the two parts compute the same gradients as a whole backward pass.

The embedding's gradient is also computed outside autograd, because autograd would build a gradient
of the whole table [V, D] for each micro-batch."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from distributed_training.models.decoder import Decoder, Linear
from distributed_training.models.private import (
    copy_with_unset_parameters,
    local_part,
    store_parameter,
    stored_parameter,
)


class WeightGradients:
    """Weight gradients of the matrices in one stage's blocks, computed outside autograd."""

    def __init__(self, stage: Decoder, tp_parts: tuple[int, int]) -> None:
        """Add taps to the stage's blocks. `tp_parts` contains the numbers of parts into which
        sequence parallelism splits a block's input (see Plan). Inside the block, the inputs of the
        Linears are not split."""
        self.tp_parts = tp_parts
        # Taps that have a gradient, each with the attribute `matmul`: (layer, x [.., in])
        self.pending: list[Any] = []
        for block in stage.blocks.values():
            linears: list[Any] = [
                module
                for module in block.modules()
                if isinstance(module, Linear) and module.weight.requires_grad
            ]
            # If the block is frozen, autograd computes the gradients of adapters in the first part.
            if not linears:
                continue
            for linear in linears:
                linear.tap = linear.saved_input = None
                linear.matmul_override = _matmul_with_tap
            block.forward = functools.partial(self._forward, linears, block.forward)
        if stage.is_first:
            embedding: Any = stage.token_embedding
            embedding.forward = functools.partial(_look_up, embedding, embedding.forward)

    def build_dw_runner(self) -> Callable[[], None]:
        """Return a function that computes the weight gradients of all backward passes since the
        last call of this method."""
        taps = self.pending.copy()
        self.pending.clear()
        return functools.partial(_add_weight_gradients, taps)

    def _forward(
        self,
        linears: list[Any],
        forward: Callable[..., torch.Tensor],
        x: torch.Tensor,
        *others: Any,
        **options: Any,
    ) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return forward(x, *others, **options)
        samples, tokens = self.tp_parts
        for linear in linears:
            rows = local_part(linear.weight).shape[0]
            # A number that is expanded to the shape of the output, and never read
            tap = x.new_empty(()).expand(x.shape[0] * samples, x.shape[1] * tokens, rows)
            linear.tap = tap.requires_grad_()
        out = forward(x, *others, **options)
        for linear in linears:
            linear.tap.matmul = linear, linear.saved_input
            linear.tap.register_post_accumulate_grad_hook(self.pending.append)
            linear.tap = linear.saved_input = None
        return out


def _matmul_with_tap(linear: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the output of a Linear. If the Linear has a tap, save the input and pass the gradient
    of the output to the tap."""
    if linear.tap is None:
        return linear.matmul(x)
    assert linear.saved_input is None, "a block calls each of its Linears once"
    linear.saved_input = x.detach()
    y = F.linear(x, local_part(linear.weight.detach()).to(x.dtype), linear.cast_bias(x))
    return _AttachTap.apply(y, linear.tap)


class _AttachTap(torch.autograd.Function):
    """Autograd function that returns a tensor unchanged and passes the tensor's gradient to a tap
    as well."""

    @staticmethod
    def forward(ctx, y, tap):  # type: ignore[no-untyped-def]
        ctx.shape = tap.shape
        return y.view_as(y)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient, gradient.reshape(ctx.shape)


@torch.compiler.disable  # compiled code could not register the hook
def _look_up(
    embedding: Any, forward: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor
) -> torch.Tensor:
    """Return the embeddings of token ids, [B, T] -> [B, T, D]. The backward pass adds the gradient
    to the rows of these tokens in the weight's `.grad`."""
    weight = stored_parameter(embedding, "weight")
    # tp shards the weight by vocabulary, and LoRA freezes it.
    if isinstance(weight, DTensor) or not weight.requires_grad:
        return forward(ids)

    is_padding = ids == (-1 if embedding.padding_idx is None else embedding.padding_idx)

    def add_rows(gradient: torch.Tensor) -> None:
        rows = gradient.float().masked_fill(is_padding.flatten()[:, None], 0)
        _fp32_gradient(weight).index_add_(0, ids.flatten(), rows)

    rows = F.embedding(ids.flatten(), weight.detach()).requires_grad_()
    rows.register_hook(add_rows)
    # The embedding may scale its rows, so it looks them up in a table that has only these.
    table = copy_with_unset_parameters(embedding, {})
    store_parameter(table, "weight", rows)
    table.padding_idx = None
    return type(table).forward(table, torch.arange(len(rows), device=ids.device).view(ids.shape))


@torch.no_grad()
def _add_weight_gradients(taps: list[Any]) -> None:
    """Add this rank's shards of the weight gradients to the weights' `.grad`."""
    for tap in taps:
        linear, x = tap.matmul
        gradient = _fp32_gradient(linear.weight)
        factors = tap.grad.flatten(0, -2).t(), x.flatten(0, -2)
        if gradient.is_cuda:
            # One kernel multiplies and adds. It moves 8 bytes per weight instead of 12.
            torch.addmm(gradient, *factors, out_dtype=torch.float32, out=gradient)
        else:
            gradient.add_(torch.mm(*factors))
        # The losses keep the taps alive until the end of the step.
        tap.grad = tap.matmul = None


def _fp32_gradient(weight: Any) -> torch.Tensor:
    """Return this rank's shard of the weight's `.grad`, which is in fp32 as in FSDP. If there is
    no gradient yet, set it to 0. Rounded weights share the gradient of the fp32 weights."""
    weight = getattr(weight, "fp32_parameter", weight)
    if weight.grad is None:
        weight.grad_dtype = torch.float32
        weight.grad = torch.zeros_like(weight, dtype=torch.float32)
    return local_part(weight.grad)
