"""Cost of activation checkpointing: the backward pass computes again what it needs. No torch
import."""

from collections.abc import Sequence

from distributed_training.predict.costs import block, lora, tp
from distributed_training.predict.mechanism import Cost, Mechanism, Timing


def all_again(at: Timing, forward: Cost) -> Sequence[Cost]:
    """Return the forward pass without its last product, which nothing needs again. In compiled
    blocks, which read an adapter's output where they read the product it is added to, nothing
    needs the sum."""
    last = block.last_product(at)
    if at.config.compile:
        return forward, -(last + (0 if at.trained else lora.block(at)[0] / 2))
    return (forward, -last) if at.trained else (forward,)


def elementwise_again(at: Timing, forward: Cost) -> Sequence[Cost]:
    """Return the cost of norms, GELU and sums, and of half of the exchanges over tp."""
    return (block.elementwise(at)[0] + 0.5 * tp.exchange_in_block(at),)


FULL = Mechanism(used=lambda plan: plan.config.activation_checkpointing == "full", again=all_again)
SELECTIVE = Mechanism(
    used=lambda plan: plan.config.activation_checkpointing == "selective", again=elementwise_again
)
