"""Trade arithmetic for memory: drop activations in forward, compute them again in backward."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from distributed_training.models.decoder import Decoder
from distributed_training.parallel.private import ATTENTION_OPS

# What "selective" keeps: the results of matrix products and attention, which are expensive
# to compute again. Norms, GELU and residual sums are cheap and are recomputed.
_KEPT = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, *ATTENTION_OPS]


def apply_checkpointing(model: Decoder, mode: str) -> None:
    """Make every block recompute in backward, in place.

    "full" keeps only a block's input, [batch, seq_len, hidden]; "selective" also keeps what is
    in `_KEPT`; "none" changes nothing. Dropout masks are reproduced from the saved RNG state.
    """
    if mode == "none":
        return
    options: dict[str, Any] = {}
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _KEPT)
    for block in model.split().blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)
