"""Define the attention function that all models share, and the document boundaries that restrict
attention.

A sample of packed records contains several documents. Each document is computed as if it were
alone: positions restart, and a token attends only to itself and to earlier tokens of its document.
The letters in shapes are defined in decoder.py. In addition, G is the number of key/value heads,
which divides H, and S is the number of keys."""

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from distributed_training.models.sink_attention import SinkAttention, to_rows, window_size
from distributed_training.models.wide_attention import wide_attention

if torch.cuda.is_available():  # Importing the kernel takes seconds, and only GPUs use it.
    from torch.nn.attention.varlen import varlen_attn
# FlashAttention's kernels accept multiples of 8 up to this size.
_MAX_HEAD_SIZE = 256


class Documents(NamedTuple):
    """Boundaries of the documents in a micro-batch, computed once for all blocks of a model.

    Padding counts as a separate document. Attention uses `ends` if its kernel supports the size of
    the heads, and `mask` otherwise. If neither is set, each sample is a single document."""

    # Position of each token in its document, int64 [B, T], or of the first token if the positions
    # are consecutive
    positions: Any
    ends: torch.Tensor | None = None  # 0, then each document's end in the B T tokens, int32
    mask: torch.Tensor | None = None  # [B, 1, T, T]: 0 if a query attends to a key, else -inf


def describe_documents(
    positions: torch.Tensor,
    ends: torch.Tensor,
    *,
    dtype: torch.dtype,
    head_sizes: Collection[int],
    dropout: float,
    max_documents: int | None = None,
) -> Documents:
    """Return the boundaries of the documents in a micro-batch. `positions` [B, T] and `ends` [B, E]
    are arrays from `Samples.batch`. `ends` contains the ends of the documents in each sample,
    padded with T.

    On a GPU, attention in bf16 without dropout uses a kernel that reads the ends, if the kernel
    supports the head size. For other sizes, this function builds a mask of `B T^2` numbers in
    `dtype`, the dtype of the queries. All blocks share the mask.

    The kernel is slow if many documents are empty. Set `max_documents` if the micro-batch has at
    most this many documents. The result then contains only this many ends."""
    batch, seq_len = positions.shape
    num_supported = 0
    if positions.is_cuda and dtype is torch.bfloat16 and not dropout:
        num_supported = sum(map(has_kernel, head_sizes))
    flat_ends = None
    mask = None
    if num_supported > 0:
        sample_starts = torch.arange(batch, device=ends.device)[:, None] * seq_len
        flat_ends = (ends + sample_starts).flatten().to(torch.int32)
        if max_documents is not None:
            flat_ends = drop_empty(flat_ends, max_documents)
        flat_ends = F.pad(flat_ends, (1, 0))
    if num_supported < len(head_sizes):
        mask = mask_documents(positions, dtype)
    return Documents(positions, flat_ends, mask)


def has_kernel(head_size: int) -> bool:
    """Return whether FlashAttention's kernels accept heads of this size."""
    return head_size % 8 == 0 and head_size <= _MAX_HEAD_SIZE


def drop_empty(ends: torch.Tensor, num_kept: int) -> torch.Tensor:
    """Return the ends of the non-empty documents, [num_kept]. `ends` must be in ascending order. An
    empty document has the same end as the document before it. If fewer than `num_kept` documents
    remain, the last end is repeated. If more than `num_kept` documents remain, torch raises an
    error on the CPU, and a device-side assertion fails on a GPU."""
    is_new = F.pad(ends.diff(), (1, 0), value=1) > 0
    index = is_new.cumsum(0) - 1
    return ends[-1].repeat(num_kept).scatter(0, index, ends)


def mask_documents(positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute the document mask, [B, 1, T, T] in `dtype`, from each token's position in its
    document, int64 [B, T]."""
    indices = torch.arange(positions.shape[1], device=positions.device)
    starts = indices - positions
    same_document = starts[:, :, None] == starts[:, None, :]
    visible = same_document & (indices[:, None] >= indices)
    mask = torch.zeros_like(visible, dtype=dtype)
    return mask.masked_fill_(~visible, -torch.inf)[:, None]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: Documents | None = None,
    *,
    is_causal: bool = True,
    dropout: float = 0.0,
    scale: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of q [B, H, T, K] to k and v, each [B, G, S, K]. The result has the
    shape [B, T, H, K].

    With `documents`, tokens attend only within their document. `dropout` is the fraction of
    attention weights to drop. `scale` is the factor by which `q k^T` is multiplied, by default
    `K^(-1/2)`. If `documents` has ends, tokens can be limited to the last `window` tokens. `sinks`
    [H] are those of sink_attention.py. They need causal attention and, on a GPU, `documents` with
    ends."""
    ends, mask = (None, None) if documents is None else documents[1:]
    if sinks is not None:
        y = SinkAttention.apply(
            q, k, _as_wide(v, q), sinks.float()[:, None], ends, mask, scale, window
        )
        return y[..., : v.shape[-1]].transpose(1, 2)
    if ends is not None and has_kernel(q.shape[-1]):
        y = _attend_in_documents(q, k, _as_wide(v, q), ends, scale, window)
        return y[..., : v.shape[-1]]
    is_wide = q.is_cuda and q.dtype is torch.bfloat16 and q.shape[-1] > _MAX_HEAD_SIZE
    if is_wide and is_causal and not dropout:
        wide_y = wide_attention(q, k, v, mask, q.shape[-1] ** -0.5 if scale is None else scale)
        return wide_y.transpose(1, 2).contiguous()
    # On CUDA, the kernels for fp32, older GPUs, masks and large heads do not support grouped heads.
    is_fast = q.dtype is torch.bfloat16 and mask is None and has_kernel(q.shape[-1])
    if q.is_cuda and not is_fast and k.shape[1] < q.shape[1]:
        repeats = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(repeats, 1)
        v = v.repeat_interleave(repeats, 1)
    y = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=is_causal and mask is None,
        dropout_p=dropout,
        enable_gqa=k.shape[1] < q.shape[1],
        scale=scale,
    )
    # The result is made contiguous so that its gradient always has the same strides. cuDNN's
    # backward pass (torch 2.11) reuses the strides of the first gradient with these shapes. A
    # compiled step after an eager one in the same process would therefore compute wrong gradients.
    # Nothing is copied if q is a view of [B, T, H, K].
    return y.transpose(1, 2).contiguous()


def _attend_in_documents(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ends: torch.Tensor,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    batch, _, seq_len, _ = q.shape
    y: Any = varlen_attn(
        to_rows(q),
        to_rows(k),
        to_rows(v),
        ends,
        ends,
        seq_len,
        seq_len,
        scale=scale,
        window_size=window_size(window),
        enable_gqa=True,
    )
    return y.unflatten(0, (batch, seq_len))


def _as_wide(v: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return values with zeros up to the width of the queries. Some kernels need equal widths, but
    the values of DeepSeek's heads are narrower."""
    missing = q.shape[-1] - v.shape[-1]
    return F.pad(v, (0, missing)) if missing > 0 else v
