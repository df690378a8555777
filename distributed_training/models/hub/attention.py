"""Provide this package's attention through the AttentionInterface that transformers models call."""

import contextlib
import functools
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn as nn

from distributed_training.models.attention import Documents, attend, has_kernel, mask_documents
from distributed_training.models.hub import UnsupportedError

NAME = "distributed_training"  # under which functions are registered
# Tensors that models pass to attention but that do not affect the result
_IGNORED_OPTIONS = {"position_ids", "cache_position", "position_embeddings"}


def attention(
    module: nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    documents: Documents | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention of q [B, H, T, K] to k and v [B, G, S, K] -> [B, T, H, K].

    A token attends to the last `sliding_window` tokens, including itself. In layers with chunked
    attention, it attends only within its chunk. T must equal S, unless T
    is 1 and q belongs to the last of the S tokens. `first_position` is the position of the first of
    the T tokens. The model's own eager function handles soft caps and additional tensors, among
    them attention sinks (`s_aux`) if no kernel computes them. Raises UnsupportedError if there is a
    mask or if attention is not causal."""
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise UnsupportedError("has attention that is not causal")
    exchange = getattr(module, "exchange", None)
    if exchange is not None and q.shape[2] > 1:  # cp splits the tokens (parallel/context.py)
        if documents is not None and documents.ends is None and documents.mask is None:
            documents = None  # it has only the position of this rank's first token
        if options.get("s_aux") is not None:
            options["s_aux"] = exchange.own_heads(options["s_aux"])
        attend_heads = functools.partial(_attend, module, documents=documents, **options)
        return exchange(attend_heads, q, k, v), None
    return _attend(module, q, k, v, documents=documents, **options), None


def _attend(
    module: nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    documents: Documents | None = None,
    first_position: int = 0,
    **options: Any,
) -> torch.Tensor:
    """Compute `attention` of all tokens."""
    length = q.shape[2]
    if 1 < length != k.shape[2]:  # such as DeepSeek-V4's compressed keys
        raise UnsupportedError("has attention with other numbers of keys than of queries")
    extra: dict[str, Any] = {}
    if softcap:
        extra["softcap"] = softcap
    for name, value in options.items():
        if torch.is_tensor(value) and name not in _IGNORED_OPTIONS:
            extra[name] = value
    window = sliding_window or length
    chunk = getattr(module, "attention_chunk", None)
    if chunk is None:
        chunk = length
    elif length == 1:
        num_visible = first_position % chunk + 1
        k, v = k[:, :, -num_visible:], v[:, :, -num_visible:]
    sinks = None
    if length > 1 and not dropout and extra.keys() == {"s_aux"}:
        sinks = extra.pop("s_aux")
    can_use_kernel = chunk == length and not extra and has_kernel(q.shape[-1])
    needs_kernel = window < length or sinks is not None
    if documents is None and needs_kernel and can_use_kernel and _is_fast(q, dropout):
        ends = torch.arange(0, (len(q) + 1) * length, length, dtype=torch.int32, device=q.device)
        documents = Documents(None, ends)
    uses_kernel = can_use_kernel and documents is not None and documents.ends is not None
    if sinks is not None and q.is_cuda and not uses_kernel:
        extra["s_aux"] = sinks
    mask = None if documents is None else documents.mask
    if length > 1 and not uses_kernel and (min(window, chunk) < length or extra):
        indices = torch.arange(length, device=q.device)
        positions = indices[None] if documents is None else documents.positions
        if mask is None:
            mask = mask_documents(positions, q.dtype)
        if window < length:
            mask = mask.masked_fill(indices[:, None] - indices >= window, -torch.inf)
        if chunk < length:
            chunks = positions[:, None] // chunk
            mask = mask.masked_fill(chunks[..., :, None] != chunks[..., None, :], -torch.inf)
        documents = Documents(positions, mask=mask)
    if extra:
        eager = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
        # Under cp, the module has more heads than these.
        heads = SimpleNamespace(
            training=module.training,
            num_key_value_groups=q.shape[1] // k.shape[1],
            head_dim=q.shape[-1],
            sinks=extra.get("s_aux"),
        )
        output, _ = eager(heads, q, k, v, mask, scaling=scaling, dropout=dropout, **extra)
        return output  # type: ignore[no-any-return]
    return attend(
        q,
        k,
        v,
        documents,
        is_causal=length > 1,
        dropout=dropout,
        scale=scaling,
        window=window if window < length else None,
        sinks=sinks,
    )


def _is_fast(q: torch.Tensor, dropout: float) -> bool:
    """Return whether the kernel that reads the ends of documents accepts the queries."""
    return q.is_cuda and q.dtype is torch.bfloat16 and not dropout


def set_chunk_sizes(net: Any) -> None:
    """Store in each module with chunked attention the number of tokens in a chunk, within which
    tokens attend. If `attention` read the module's index, each block would be compiled anew."""
    types = getattr(net.config, "layer_types", None) or ()
    for module in net.modules():
        layer = getattr(module, "layer_idx", None)
        if layer is not None and layer < len(types) and types[layer] == "chunked_attention":
            module.attention_chunk = net.config.attention_chunk_size


@contextlib.contextmanager
def attend_to_own_tokens(num_heads: int, reasons: list[str]) -> Iterator[None]:
    """Replace `attention` by a function in which each token attends only to itself. Append to
    `reasons` why cp cannot divide the heads of a call, of which the model has `num_heads`."""
    from transformers import AttentionInterface

    def attend_to_itself(
        _module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *_arguments: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        names = {name for name, value in options.items() if torch.is_tensor(value)}
        if q.shape[1] != num_heads or q.shape[2] != k.shape[2]:
            reasons.append("its attention has other numbers of heads or keys in some blocks")
        if unknown := names - _IGNORED_OPTIONS - {"s_aux"}:
            reasons.append(f"its attention needs {', '.join(sorted(unknown))}")
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1).transpose(1, 2).contiguous(), None

    AttentionInterface.register(NAME, attend_to_itself)
    yield
    AttentionInterface.register(NAME, attention)


@contextlib.contextmanager
def record_windows() -> Iterator[list[int | None]]:
    """Append the `sliding_window` that `attention` receives to the list, for each call."""
    from transformers import AttentionInterface

    windows = []

    def record(*tensors: Any, **options: Any) -> tuple[torch.Tensor, None]:
        windows.append(options.get("sliding_window"))
        return attention(*tensors, **options)

    AttentionInterface.register(NAME, record)
    yield windows
    AttentionInterface.register(NAME, attention)
