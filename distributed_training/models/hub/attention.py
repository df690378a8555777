"""Attention as transformers' models call it (its AttentionInterface), computed by the suite."""

from typing import Any

import torch
import torch.nn as nn

from distributed_training.models.attention import Documents, attend, mask_documents
from distributed_training.settings.errors import UserError

NAME = "distributed_training"
# Tensors that models hand over to attention and that it does not depend on
_KNOWN = {"position_ids", "cache_position", "position_embeddings"}


def attention(
    module: nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    documents: Documents | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of q [B, H, T, K] to k and v [B, G, S, K] -> [B, T, H, K]. A token sees the
    last `sliding_window` tokens. If T is not S, q are the last tokens, of which there is one or
    which come first."""
    length = q.shape[2]
    surplus = [name for name, value in others.items() if torch.is_tensor(value)]
    if attention_mask is not None or not getattr(module, "is_causal", True) or {*surplus} - _KNOWN:
        extra = ", ".join(surplus) or "attention that is not causal"
        raise UserError(f"{type(module).__name__} has {extra}", "no such attention is supported")
    window = sliding_window if sliding_window and sliding_window < length else None
    if documents is not None and documents.ends is not None and (window or softcap is not None):
        # The kernel that reads the ends knows neither windows nor caps.
        documents = mask_documents(documents.positions, q.dtype)
    if window and documents is None:
        shape = (length, length)
        mask = torch.zeros(shape, dtype=q.dtype, device=q.device).masked_fill_(
            ~visible_in(window, length, q.device), -torch.inf
        )
        documents = Documents(torch.empty(0, device=q.device), mask=mask[None, None])
    elif window and documents is not None and documents.mask is not None:
        hidden = ~visible_in(window, length, q.device)
        documents = documents._replace(mask=documents.mask.masked_fill(hidden, -torch.inf))
    if softcap is None:
        return attend(
            q, k, v, documents, is_causal=length > 1, dropout=dropout, scale=scaling
        ), None
    groups = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(groups, 1) for each in (k, v))
    scores = (q * (scaling or q.shape[-1] ** -0.5)) @ k.transpose(2, 3)
    scores = torch.tanh(scores / softcap) * softcap
    if documents is not None and documents.mask is not None:
        scores = scores + documents.mask
    elif length > 1:
        seen = visible_in(length, length, q.device)
        scores = scores.masked_fill(~seen, -torch.inf)
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
    weights = nn.functional.dropout(weights, dropout, module.training)
    return (weights @ v).transpose(1, 2).contiguous(), None


def visible_in(window: int, length: int, device: torch.device) -> torch.Tensor:
    """Return which of the last `window` keys each query sees, bool [length, length]."""
    places = torch.arange(length, device=device)
    distance = places[:, None] - places
    return (distance >= 0) & (distance < window)


def register() -> None:
    """Make `attention` known to transformers, without masks of its own."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)
