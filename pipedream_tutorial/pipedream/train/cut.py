"""A backward pass in two halves that together cost what it costs whole.

For a linear layer y = x W^T + b, and dY, the gradient of the loss in y:

    I:  dX = dY W      the layer before waits for it
    W:  dW = dY^T x    waits for dY alone, and nobody waits for it

Each is one product of matrices, and neither uses the other's result. autograd does both on its way
back. Asked twice, first for dX and then for dW (retain_graph), it goes the whole way twice. Here a
linear layer's backward pass does I and puts x and dY aside, and W is done from these later. The
other layers have few weights: their gradients are made in I.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class CutLinears(TorchFunctionMode):
    """Backward passes of what runs in this context leave out W for linear layers.

    Each has to lie behind what needs a gradient: the stage's input, or a norm's weights.
    """

    def __init__(self) -> None:
        self.aside: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]] = []
        """x, weight, bias and dY of each linear layer that a backward pass has come through."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is not functional.linear:
            return func(*args, **(kwargs or {}))
        x, weight, bias = (*args, None)[:3]
        out = functional.linear(x, weight.detach(), None if bias is None else bias.detach())
        kept = x.detach()
        out.register_hook(lambda dy: self.aside.append((kept, weight, bias, dy)))
        return out

    def weight_gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """W: each weight or bias and its gradient, in the bits that autograd gives."""
        for x, weight, bias, dy in self.aside:
            dy = dy.flatten(0, -2)
            yield weight, dy.t() @ x.flatten(0, -2)
            if bias is not None:
                yield bias, dy.sum(0)
