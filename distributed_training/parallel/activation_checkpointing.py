"""Trade arithmetic for memory: drop activations in forward, compute them again in backward."""

from __future__ import annotations

import functools

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from distributed_training.model import GPT2

# What "selective" keeps: the results of matrix products and attention, which are dear to compute
# again. Norms, GELU and residual sums are cheap and are recomputed.
_KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]


def apply_activation_checkpointing(model: GPT2, mode: str) -> None:
    """Make every block recompute in backward, in place.

    "full" keeps only a block's input, [batch, seq_len, hidden]; "selective" also keeps what is
    in `_KEPT`; "none" changes nothing. Dropout masks are reproduced from the saved RNG state.
    """
    if mode == "none":
        return
    options = {}
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _KEPT)
    for block in model.blocks.values():
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)
