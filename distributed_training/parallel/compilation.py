"""torch.compile, applied to functions rather than modules.

Compiling `forward` leaves module hooks (FSDP's and ZeRO-3's gathers) outside the graph, where
they run as they do without compilation.
"""

from __future__ import annotations

import torch

from distributed_training.model import GPT2


def apply_compile(model: GPT2, *, per_block: bool) -> None:
    """Compile in place: the whole forward as one graph, or block by block with embed and head.

    `per_block` is for engines that gather a block's parameters just before it runs.
    """
    if not per_block:
        model.forward = torch.compile(model.forward)
        return
    for block in model.blocks:
        block.forward = torch.compile(block.forward)
    model.embed = torch.compile(model.embed)
    model.head = torch.compile(model.head)
