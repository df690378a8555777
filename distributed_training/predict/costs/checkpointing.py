"""Estimate the cost of activation checkpointing. A block keeps fewer activations, and the backward
pass recomputes the others. This module does not import torch."""

from collections.abc import Sequence

from distributed_training.predict.costs import block, lora, tp
from distributed_training.predict.mechanism import Cost, Mechanism, Place, Timing


def all_again(at: Timing, forward: Cost) -> Sequence[Cost]:
    """Return the cost of repeating the forward pass. Only uncompiled blocks with adapters repeat
    the last matrix multiplication. Compiled blocks with adapters also save half of the adapters'
    cost."""
    last = block.last_product(at)
    if at.config.compile:
        return forward, -(last + (0 if at.trained else lora.block(at)[0] / 2))
    return (forward, -last) if at.trained else (forward,)


def elementwise_again(at: Timing, forward: Cost) -> Sequence[Cost]:
    """Return the cost of repeating the element-wise operations and half of the exchanges over
    tp."""
    return (block.elementwise(at)[0] + 0.5 * tp.exchange_in_block(at),)


def between_blocks(at: Place) -> float:
    """Return the size in bytes of a block's input, or of the gradient of its output."""
    return at.hidden * at.between


def kept_selectively(at: Place) -> float:
    """Return the total size in bytes of a block's input and of the results of its attention and
    matrix multiplications. The last result is not needed for any gradient, and only uncompiled
    blocks keep it."""
    if at.size.traced is not None:
        return at.traced_bytes("kept", "selective")
    returned = (at.size.values_in + at.size.attention_width) / at.size.hidden_size
    values = (2 if at.config.compile else 3) * at.between + returned / at.tp
    return at.hidden * values + block.statistics_bytes(at)


# The incoming gradient needs memory in addition to everything that the block keeps. In a recomputed
# block, the gradient takes the memory of the block's input.
NONE = Mechanism(
    used=lambda plan: plan.config.activation_checkpointing == "none",
    kept=block.kept,
    backward=between_blocks,
)
FULL = Mechanism(
    used=lambda plan: plan.config.activation_checkpointing == "full",
    kept=between_blocks,
    backward=block.kept,
    again=all_again,
)
SELECTIVE = Mechanism(
    used=lambda plan: plan.config.activation_checkpointing == "selective",
    kept=kept_selectively,
    backward=block.kept,
    again=elementwise_again,
)
