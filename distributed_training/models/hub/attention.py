"""This suite's attention, behind the AttentionInterface that transformers' models call."""

from typing import Any

import torch
import torch.nn as nn

from distributed_training.models.attention import Documents, attend, mask_documents
from distributed_training.settings.errors import UserError

NAME = "distributed_training"
# Tensors that models pass to attention and that do not change its result
_IGNORED = {"position_ids", "cache_position", "position_embeddings"}


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
    **other_arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention of q [B, H, T, K] to k and v [B, G, S, K] -> [B, T, H, K].

    A token attends to the last `sliding_window` tokens. Either T is S, or T is 1 and q belongs to
    the last of the S tokens. Raises UserError for a mask or any other argument that would change
    the result."""
    length = q.shape[2]
    tensors = {name for name, value in other_arguments.items() if torch.is_tensor(value)}
    unknown = sorted(tensors - _IGNORED)
    is_causal = attention_mask is None and getattr(module, "is_causal", True)
    if unknown or not is_causal:
        reason = f"depends on {', '.join(unknown)}" if unknown else "is not causal"
        what = f"attention of {type(module).__name__} {reason}"
        raise UserError(what, "only causal attention with an optional sliding window is supported")
    window = sliding_window if sliding_window and sliding_window < length else None
    if documents is not None and documents.ends is not None and (window or softcap is not None):
        # The kernel that reads document ends supports neither windows nor caps.
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
    k = k.repeat_interleave(groups, 1)
    v = v.repeat_interleave(groups, 1)
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
    """Return a mask, bool [length, length], that is True where a query attends to a key: at its
    own position or at most `window` - 1 before."""
    indices = torch.arange(length, device=device)
    distance = indices[:, None] - indices
    return (distance >= 0) & (distance < window)


def register() -> None:
    """Register `attention` with transformers, which then builds no masks of its own."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)
