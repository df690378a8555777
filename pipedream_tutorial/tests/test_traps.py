"""The ways of changing weights in flight, and what autograd makes of each."""

import math

import pytest
import torch
from pipedream.train.traps import (
    copy_into_data,
    linear_stage,
    normed_stage,
    replace_data,
    run_trap,
    step_optimizer,
)


def test_new_memory_is_stashing_by_accident_and_for_linear_layers_only() -> None:
    outcome = run_trap(linear_stage, replace_data)
    assert outcome.error == 0
    assert outcome.error_at_new > 0.01
    assert 0 < run_trap(normed_stage, replace_data).error < math.inf
    # The smallest case: a product's factor is saved as the Parameter itself.
    factor = torch.nn.Parameter(torch.tensor([2.0]))
    x = torch.tensor([1.0], requires_grad=True)
    product = x * factor
    factor.data = torch.tensor([5.0])
    assert torch.autograd.grad(product, x)[0].item() == 5.0


@pytest.mark.parametrize("build", [linear_stage, normed_stage])
def test_a_step_is_refused_and_a_copy_is_silently_wrong(build) -> None:
    outcome = run_trap(build, step_optimizer)
    assert outcome.refusal is not None
    assert "modified by an inplace operation" in outcome.refusal
    assert math.isnan(outcome.error)
    outcome = run_trap(build, copy_into_data)
    assert outcome.refusal is None
    assert 1e-3 < outcome.error < 1
    assert 1e-3 < outcome.error_at_new < 1  # nor is it the gradient at the new weights
