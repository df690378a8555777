"""torch.compile, applied to the functions where the time goes."""

from __future__ import annotations

import torch

from distributed_training.model import GPT2


def apply_compile(model: GPT2) -> None:
    """Compile every block's forward and the loss, in place, each as a graph of its own.

    All blocks share one graph, so compiling takes seconds rather than growing with depth. The
    graphs hold no module hooks: FSDP's and ZeRO-3's gathers run around them, as they do without
    compilation. Embedding and last norm, which such hooks serve too, stay eager.
    """
    for block in model.blocks:
        block.forward = torch.compile(block.forward)
    model.loss = torch.compile(model.loss)
