"""Attention, the same function for every model, and the documents that limit it.

A block of packed records holds several documents. Each is computed as if it were alone: positions
restart, and a token attends to earlier tokens of its own document only. Letters as in decoder.py; H
heads, G heads of keys and values (H is a multiple of G), K numbers per head, S keys."""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

_PARAMETERS: Mapping[str, Any] = {}
if torch.backends.cuda.is_built():  # the kernel's import takes seconds
    from torch.nn.attention.varlen import varlen_attn

    _PARAMETERS = inspect.signature(varlen_attn).parameters
_GROUPS = "enable_gqa" in _PARAMETERS  # torch 2.11 has as many heads of keys as of queries
_WINDOWS = "window_size" in _PARAMETERS  # in place of is_causal
# Multiples of 8 numbers per head, up to this, are what FlashAttention's kernels are compiled for.
_LARGEST_HEAD = 256


class Documents(NamedTuple):
    """The documents of a micro-batch, described once for all blocks of a model. Padding is a
    document of its own. Either `ends` or `mask` limits attention."""

    positions: torch.Tensor  # of each token in its document, int64 [B, T]
    ends: torch.Tensor | None = None  # 0 and the ends of all documents in B T tokens, int32
    mask: torch.Tensor | None = None  # [B, 1, T, T]: 0 where a query sees a key, else -inf


def describe_documents(
    positions: torch.Tensor,
    ends: torch.Tensor,
    *,
    dtype: torch.dtype,
    head_size: int,
    dropout: float,
) -> Documents:
    """Describe documents from `Samples.batch`: positions [B, T], and the ends of each block's
    documents, [B, E], which repeat T at the end. A kernel for bf16 on GPUs, without dropout, reads
    the ends. Elsewhere a mask in the `dtype` of queries is built, B T^2 numbers for all blocks."""
    batch, seq_len = positions.shape
    fits = head_size % 8 == 0 and head_size <= _LARGEST_HEAD
    if positions.is_cuda and dtype is torch.bfloat16 and fits and not dropout:
        rows = torch.arange(batch, device=ends.device)[:, None] * seq_len
        flat = (ends + rows).flatten().to(torch.int32)
        return Documents(positions, F.pad(flat, (1, 0)))
    return mask_documents(positions, dtype)


def mask_documents(positions: torch.Tensor, dtype: torch.dtype) -> Documents:
    """Describe documents by a mask, from each token's position in its document, int64 [B, T]."""
    places = torch.arange(positions.shape[1], device=positions.device)
    starts = places - positions
    same = starts[:, :, None] == starts[:, None, :]
    visible = same & (places[:, None] >= places)
    mask = torch.zeros(visible.shape, dtype=dtype, device=positions.device)
    return Documents(positions, mask=mask.masked_fill_(~visible, -torch.inf)[:, None])


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: Documents | None = None,
    *,
    is_causal: bool = True,
    dropout: float = 0.0,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of q [B, H, T, K] to k and v, [B, G, S, K] each -> [B, T, H, K], within `documents`
    if given. `dropout`: the share of attention weights to drop; `scale`: the factor of q k^T, by
    default K^(-1/2)."""
    if documents is not None and documents.ends is not None:
        return _attend_in_documents(q, k, v, documents.ends, scale)
    mask = None if documents is None else documents.mask
    grouped = k.shape[1] < q.shape[1]
    # CUDA's kernels for fp32, those of older GPUs, and those with a mask know no groups.
    if grouped and q.is_cuda and (q.dtype is not torch.bfloat16 or mask is not None):
        k, v = _repeat_heads(q, k, v)
        grouped = False
    y = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal and mask is None, dropout_p=dropout,
        enable_gqa=grouped, scale=scale,
    )  # fmt: skip
    # Contiguous, so that its gradient always has the same strides. cuDNN's backward pass (torch
    # 2.11) reuses the strides of the first gradient of these shapes: a compiled step after an eager
    # one, in the same process, would compute wrong gradients. Free if q is a view of [B, T, H, K].
    return y.transpose(1, 2).contiguous()


def _attend_in_documents(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, scale: float | None
) -> torch.Tensor:
    batch, _, seq_len, _ = q.shape
    options: dict[str, Any] = {"window_size": (-1, 0)} if _WINDOWS else {"is_causal": True}
    options["scale"] = scale
    if k.shape[1] < q.shape[1]:
        if _GROUPS:
            options["enable_gqa"] = True
        else:
            k, v = _repeat_heads(q, k, v)
    q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in (q, k, v))  # [B T, heads, K]
    y: Any = varlen_attn(q, k, v, ends, ends, seq_len, seq_len, **options)
    return y.unflatten(0, (batch, seq_len))


def _repeat_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v with a head for each of q."""
    times = q.shape[1] // k.shape[1]
    k, v = (each[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2) for each in (k, v))
    return k, v
