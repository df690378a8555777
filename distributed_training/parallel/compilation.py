"""torch.compile, applied to the functions where the time goes."""

from __future__ import annotations

import torch

from distributed_training.model import GPT2


def apply_compile(model: GPT2, *, cuda_graphs: bool = False) -> None:
    """Compile every block's forward and the loss, in place, each as a graph of its own.

    All blocks share one graph, so compiling takes seconds rather than growing with depth. The
    graphs hold no module hooks: FSDP's and ZeRO-3's gathers run around them, as they do without
    compilation. Embedding and last norm, which such hooks serve too, stay eager.

    With `cuda_graphs` a block's kernels are launched by one call instead of one each, which
    decides the speed of small batches. It needs parameters that stay where they are, and gradients
    that nobody holds on to: the caller marks each step's begin (cudagraph_mark_step_begin).
    """
    mode = "reduce-overhead" if cuda_graphs else "default"
    for block in model.blocks.values():
        block.forward = torch.compile(block.forward, mode=mode)
    model.loss = torch.compile(model.loss, mode=mode)
