"""This suite's attention, behind the AttentionInterface that transformers' models call."""

import sys
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
    if (window or softcap) and length > 1 and (documents is None or documents.mask is None):
        # The kernel that reads document ends supports neither windows nor caps.
        whole = torch.arange(length, device=q.device)[None]
        positions = whole if documents is None else documents.positions
        documents = mask_documents(positions, q.dtype)
    mask = None if documents is None else documents.mask
    if window and documents is not None and mask is not None:
        indices = torch.arange(length, device=q.device)
        mask = mask.masked_fill(indices[:, None] - indices >= window, -torch.inf)
        documents = documents._replace(mask=mask)
    if softcap:
        eager: Any = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
        options: dict[str, Any] = {"scaling": scaling, "dropout": dropout, "softcap": softcap}
        return eager(module, q, k, v, mask, **options)[0], None
    return attend(q, k, v, documents, is_causal=length > 1, dropout=dropout, scale=scaling), None


def register() -> None:
    """Register `attention` with transformers, which then builds no masks of its own."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)
