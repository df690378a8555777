"""torch.compile, applied to the functions where the time goes."""

from __future__ import annotations

import torch

from distributed_training.models.decoder import Decoder


def apply_compile(model: Decoder, *, cuda_graphs: bool = False) -> None:
    """Compile every block's forward and the loss, in place, each as a graph of its own.

    All blocks share one graph, so compiling takes seconds at any depth. FSDP's and ZeRO-3's hooks
    run around the graphs; embedding and last norm, which such hooks serve too, stay eager.

    With `cuda_graphs`, for small batches, a block's kernels are launched by one call. It needs
    parameters that stay where they are and gradients that nobody holds on to, and the caller marks
    where each step begins (cudagraph_mark_step_begin).
    """
    mode = "reduce-overhead" if cuda_graphs else "default"
    for block in model.split().blocks:
        block.forward = torch.compile(block.forward, mode=mode)
    model.loss = torch.compile(model.loss, mode=mode)
