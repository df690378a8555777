"""Provide this package's attention through the AttentionInterface that transformers models call."""

import sys
from typing import Any

import torch
import torch.nn as nn

from distributed_training.models.attention import Documents, attend, mask_documents
from distributed_training.settings.errors import UserError

NAME = "distributed_training"
# Tensors that models pass to attention but that do not affect the result
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
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention of q [B, H, T, K] to k and v [B, G, S, K] -> [B, T, H, K].

    A token attends to the last `sliding_window` tokens, including itself. Either T is S, or T is 1
    and q belongs to the last of the S tokens. The model's own eager function handles soft caps and
    additional tensors, such as attention sinks. Raises UserError if there is a mask or attention is
    not causal."""
    if attention_mask is not None or not getattr(module, "is_causal", True):
        what = f"attention of {type(module).__name__} is not causal"
        raise UserError(what, "only causal attention with an optional sliding window is supported")
    length = q.shape[2]
    extra: dict[str, Any] = {"softcap": softcap} if softcap else {}
    for name, value in options.items():
        if torch.is_tensor(value) and name not in _IGNORED:
            extra[name] = value
    window = sliding_window if sliding_window and sliding_window < length else None
    mask = None if documents is None else documents.mask
    if (window or extra) and mask is None and length > 1:
        # The kernel that reads document ends supports neither windows nor caps.
        whole = torch.arange(length, device=q.device)[None]
        documents = mask_documents(whole if documents is None else documents.positions, q.dtype)
        mask = documents.mask
    if window and documents is not None and mask is not None:
        indices = torch.arange(length, device=q.device)
        mask = mask.masked_fill(indices[:, None] - indices >= window, -torch.inf)
        documents = documents._replace(mask=mask)
    if extra:
        eager: Any = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
        return eager(module, q, k, v, mask, scaling=scaling, dropout=dropout, **extra)[0], None
    return attend(q, k, v, documents, is_causal=length > 1, dropout=dropout, scale=scaling), None


def register() -> str:
    """Register `attention` with transformers, which then builds no masks. Return the registered
    name."""
    from transformers import AttentionInterface  # slow, and freezes the Hub's settings

    AttentionInterface.register(NAME, attention)
    return NAME


class _ReachedError(Exception):
    """Stand-in for documents that is raised when attention reads its mask."""

    @property
    def mask(self) -> None:
        raise self


def receives_documents(inner: Any) -> bool:
    """Return whether the blocks of a model on "meta" pass documents on to `attention`."""
    if inner.config._attn_implementation != NAME:
        return False
    ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    try:
        inner(input_ids=ids, use_cache=False, documents=_ReachedError())
    except _ReachedError:
        return True
    return False
