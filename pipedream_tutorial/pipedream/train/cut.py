"""A backward pass in two halves that together cost what it costs whole.

For a linear layer y = x W^T + b, and dY, the gradient of the loss in y:

    I:  dX = dY W      the layer before waits for it
    W:  dW = dY^T x    waits for dY alone, and nobody waits for it

Each is one product of matrices, and neither uses the other's result. autograd does both on its way
back. Asked twice, first for dX and then for dW (retain_graph), it goes the whole way twice. Here a
linear layer's backward pass does I and puts x and dY aside, and W is done from these later. The
other layers have few weights: their gradients are made in I.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode


@dataclass(slots=True)
class LinearCall:
    """One call of a linear layer in a forward pass, and what its W needs."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    output_gradient: Any = None
    """A tensor from the moment at which the backward pass was there."""

    def weight_gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(weight or bias, its gradient); the bits that autograd gives."""
        dy = self.output_gradient.flatten(0, -2)
        found = [(self.weight, dy.t() @ self.x.flatten(0, -2))]
        return found if self.bias is None else [*found, (self.bias, dy.sum(0))]


class _InputGradientOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, call: LinearCall) -> torch.Tensor:
        ctx.call = call
        ctx.save_for_backward(weight)
        return functional.linear(x, weight, call.bias)

    @staticmethod
    def backward(ctx: Any, output_gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.call.output_gradient = output_gradient
        (weight,) = ctx.saved_tensors
        return (output_gradient @ weight if ctx.needs_input_grad[0] else None), None, None


class CutLinears(TorchFunctionMode):
    """Inside this context backward passes will leave out W for linear layers; `calls` has it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[LinearCall] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is not functional.linear:
            return func(*args, **(kwargs or {}))
        x, weight, bias = (*args, None)[:3]
        self.calls.append(LinearCall(x.detach(), weight, bias))
        return _InputGradientOnly.apply(x, weight, self.calls[-1])
