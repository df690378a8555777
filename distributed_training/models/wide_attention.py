"""Compute causal attention with heads that are too large for FlashAttention's kernels.

torch's other kernel needs 15 ms for the backward pass of one layer of Gemma 4 E4B (heads of 512,
4,096 tokens, one H200). Here, the scores of some queries at a time are ordinary matrices. Only q,
k, v and the result are kept, and the scores are computed again.

The letters in shapes are those of attention.py. R is the number of query heads per key head."""

from collections.abc import Iterator
from typing import Any

import torch

_CHUNK = 1024  # queries whose scores are in memory


def _weights(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Yield (queries, keys up to the last query, attention weights [B, G, R, queries, keys]) for
    q [B, G, R, T, K] and k [B, G, 1, T, K]. `mask` is that of attention.Documents."""
    length = q.shape[-2]
    indices = torch.arange(length, device=q.device)
    for start in range(0, length, _CHUNK):
        queries = slice(start, min(start + _CHUNK, length))
        keys = slice(queries.stop)
        products = q[..., queries, :] @ k[..., keys, :].mT
        scores = products.float() * scale
        if mask is None:
            is_later = indices[keys] > indices[queries, None]
            scores.masked_fill_(is_later, -torch.inf)
        else:
            scores += mask[:, :, None, queries, keys]
        yield queries, keys, scores.softmax(-1).to(q.dtype)


@torch.library.custom_op("distributed_training::wide_attention", mutates_args=())
def wide_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Return the attention of q [B, H, T, K] to k and v [B, G, T, K], with the shape of q."""
    grouped_q, k, v = _group(q, k, v)
    y = torch.empty_like(grouped_q)
    for queries, keys, weights in _weights(grouped_q, k, mask, scale):
        y[..., queries, :] = weights @ v[..., keys, :]
    return y.flatten(1, 2)


@torch.library.custom_op("distributed_training::wide_attention_backward", mutates_args=())
def _wide_attention_backward(
    dy: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    y: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v."""
    grouped_q, k, v = _group(q, k, v)
    dy = dy.reshape_as(grouped_q)
    # Sum over keys of each query's weights times their gradients
    shares = dy.float() * y.view_as(dy)
    sums = shares.sum(-1, keepdim=True)
    dq = torch.empty_like(grouped_q)
    dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
    for queries, keys, weights in _weights(grouped_q, k, mask, scale):
        dy_part = dy[..., queries, :]
        dv_products = weights.mT @ dy_part
        dv[..., keys, :] += dv_products.sum(2, keepdim=True)
        d_weights = dy_part @ v[..., keys, :].mT
        d_scores = d_weights - sums[..., queries, :]
        d_scores = (d_scores * weights * scale).to(q.dtype)
        dq[..., queries, :] = d_scores @ k[..., keys, :]
        products = d_scores.mT @ grouped_q[..., queries, :]
        dk[..., keys, :] += products.sum(2, keepdim=True)
    return dq.flatten(1, 2), dk[:, :, 0].to(q.dtype), dv[:, :, 0].to(q.dtype)


def _group(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return contiguous q [B, G, R, T, K] and k, v [B, G, 1, T, K]."""
    grouped = q.unflatten(1, (k.shape[1], -1)).contiguous()
    return grouped, k[:, :, None].contiguous(), v[:, :, None].contiguous()


@wide_attention.register_fake
def _(q, *_):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape)


@_wide_attention_backward.register_fake
def _(dy, q, k, v, *_):  # type: ignore[no-untyped-def]
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _save(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    q, k, v, mask, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, output, mask)


def _backward(ctx: Any, dy: torch.Tensor) -> Any:
    q, k, v, y, mask = ctx.saved_tensors
    return *_wide_attention_backward(dy, q, k, v, y, mask, ctx.scale), None, None


wide_attention.register_autograd(_backward, setup_context=_save)
