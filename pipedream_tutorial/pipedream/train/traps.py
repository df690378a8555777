"""Updating weights between a forward pass and its backward pass: what autograd makes of it.

    python -m pipedream.train.traps

A stage without weight stashing changes its weights while graphs are in flight. In PyTorch the
obvious ways of writing that do not do it: one raises, one keeps old weights alive unasked, for some
layers. Checked with torch 2.13 on CPU; what a layer saves is torch's own affair and may change.
"""

from collections.abc import Callable

import torch
from torch import nn

from pipedream.train.oracle import relative_difference

LEARNING_RATE = 0.1
Update = Callable[[nn.Parameter, torch.Tensor], None]


def replace_data(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """Put new memory under the same Parameter. What autograd saved as a view (a Linear's transposed
    weight) still points to the old memory; what it saved as the Parameter itself (a LayerNorm's
    weight, the right factor of `x @ w`) shows the new one."""
    parameter.data = parameter.data - LEARNING_RATE * gradient


def step_optimizer(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """Update in place, counted by autograd, which will refuse the graph."""
    parameter.grad = gradient
    torch.optim.SGD([parameter], lr=LEARNING_RATE).step()


def copy_into_data(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """Update in place and uncounted: the graph reads the new values."""
    parameter.data.copy_(parameter.data - LEARNING_RATE * gradient)


WAYS: dict[str, Update] = {
    "p.data = new": replace_data,
    "optimizer.step()": step_optimizer,
    "p.data.copy_(new)": copy_into_data,
}


def run_trap(update: Update, *, norm: bool) -> float | str:
    """Run a forward pass, `update` of the weights by another microbatch's gradient, backward pass:
    the gradient's error relative to the one without the update between, or autograd's refusal.

    Exactly 0: the backward pass used the old weights. `norm`: a LayerNorm between the Linears.
    """
    torch.manual_seed(0)
    between = [nn.LayerNorm(32)] if norm else []
    layers = [nn.Linear(16, 32), nn.Tanh(), *between, nn.Linear(32, 16)]
    module = nn.Sequential(*layers).double()
    weights = list(module.parameters())
    generator = torch.Generator().manual_seed(1)
    first, second = torch.randn(2, 8, 16, generator=generator, dtype=torch.float64)
    exact = torch.autograd.grad(module(first).square().mean(), weights)
    in_flight = module(first).square().mean()
    others = torch.autograd.grad(module(second).square().mean(), weights)
    for parameter, gradient in zip(weights, others, strict=True):
        update(parameter, gradient)
    try:
        return relative_difference(torch.autograd.grad(in_flight, weights), exact)
    except RuntimeError as error:
        return f"autograd refuses: {str(error).partition(':')[0]}"


if __name__ == "__main__":
    print("Forward pass, update of the weights, backward pass. The gradient's error:")
    for text, update in WAYS.items():
        for kind, norm in (("Linear", False), ("Linear and LayerNorm", True)):
            result = run_trap(update, norm=norm)
            if result == 0:
                result = "0 exactly: the graph kept the old memory, stashing by accident"
            elif isinstance(result, float):
                result = f"{result:.2%}: wrong, and no word of warning"
            print(f"  {text:18} {kind:21} {result}")
    print("Only p.data.copy_(new) is training without stashing, whatever the layers.")
