"""Show how autograd reacts to a weight update between a forward pass and its backward pass.

    python -m pipedream.train.traps

A stage without weight stashing changes its weights while graphs are in flight. The obvious
implementations in PyTorch fail: one raises an error, and one silently keeps old weights for some
layers. The results were checked with torch 2.13 on CPUs. Other versions of torch may save different
tensors.
"""

from collections.abc import Callable

import torch
from torch import nn

from pipedream.train.oracle import relative_difference

LEARNING_RATE = 0.1
Update = Callable[[nn.Parameter, torch.Tensor], None]


def replace_data(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """Assign a new tensor with the new values to `.data`. If autograd saved a view, such as a
    Linear's transposed weight, the view still points to the old memory. If autograd saved the
    Parameter itself, such as a LayerNorm's weight or the right factor of `x @ w`, the graph reads
    the new values."""
    parameter.data = parameter.data - LEARNING_RATE * gradient


def step_optimizer(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """Update the parameter in place. Autograd detects this change, and the backward pass fails."""
    parameter.grad = gradient
    torch.optim.SGD([parameter], lr=LEARNING_RATE).step()


def copy_into_data(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """Update the parameter in place through `.data`. Autograd does not detect this change, so the
    backward pass reads the new values."""
    parameter.data.copy_(parameter.data - LEARNING_RATE * gradient)


UPDATES: dict[str, Update] = {
    "p.data = new": replace_data,
    "optimizer.step()": step_optimizer,
    "p.data.copy_(new)": copy_into_data,
}


def run_trap(update: Update, *, norm: bool) -> float | str:
    """Run one microbatch's forward pass, update the weights with another microbatch's gradient, and
    run the first microbatch's backward pass. Return the gradient's error relative to the gradient
    without the update, or autograd's error message. An error of exactly 0 means that the backward
    pass used the old weights. If `norm` is true, a LayerNorm is between the Linears."""
    torch.manual_seed(0)
    between = [nn.LayerNorm(32)] if norm else []
    layers = [nn.Linear(16, 32), nn.Tanh(), *between, nn.Linear(32, 16)]
    module = nn.Sequential(*layers).double()
    weights = list(module.parameters())
    generator = torch.Generator().manual_seed(1)
    first, second = torch.randn(2, 8, 16, generator=generator, dtype=torch.float64)
    exact = torch.autograd.grad(module(first).square().mean(), weights)
    in_flight = module(first).square().mean()
    other_gradients = torch.autograd.grad(module(second).square().mean(), weights)
    for parameter, gradient in zip(weights, other_gradients, strict=True):
        update(parameter, gradient)
    try:
        return relative_difference(torch.autograd.grad(in_flight, weights), exact)
    except RuntimeError as error:
        return f"autograd rejects: {str(error).partition(':')[0]}"


if __name__ == "__main__":
    print("Error of the gradient if weights are updated between the forward and backward passes:")
    for text, update in UPDATES.items():
        for kind, norm in (("Linear", False), ("Linear and LayerNorm", True)):
            result = run_trap(update, norm=norm)
            if result == 0:
                result = "exactly 0: the graph kept the old memory, which is stashing by accident"
            elif isinstance(result, float):
                result = f"{result:.2%}: wrong, without a warning"
            print(f"  {text:18} {kind:21} {result}")
    print("Only p.data.copy_(new) trains without stashing for all layers.")
