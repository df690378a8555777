"""torch.compile, applied to functions rather than modules."""

from __future__ import annotations

import torch

from distributed_training.model import GPT2


def apply_compile(model: GPT2) -> None:
    """Compile embedding, blocks and head in place, each as a graph of its own.

    All blocks share one graph, so compiling takes seconds rather than growing with depth.
    Compiling `forward` instead of the module leaves module hooks (FSDP's and ZeRO-3's gathers)
    outside the graph, where they run as they do without compilation.
    """
    model.embed = torch.compile(model.embed)
    for block in model.blocks:
        block.forward = torch.compile(block.forward)
    model.head = torch.compile(model.head)
