"""The ways of changing weights in flight, and what autograd makes of each."""

import math
from collections.abc import Callable

import pytest
import torch
from pipedream.train import traps
from pipedream.train.traps import (
    copy_into_data,
    linear_stage,
    normed_stage,
    replace_data,
    run_trap,
    step_optimizer,
)


def test_new_memory_is_accidental_stashing_for_linear_layers() -> None:
    outcome = run_trap(linear_stage, replace_data)
    assert outcome.error == 0
    assert outcome.error_at_new > 0.01


def test_new_memory_is_not_even_stashing_for_other_layers() -> None:
    assert 0 < run_trap(normed_stage, replace_data).error < math.inf
    # The smallest case: a product's factor is saved as the Parameter itself.
    factor = torch.nn.Parameter(torch.tensor([2.0]))
    x = torch.tensor([1.0], requires_grad=True)
    product = x * factor
    factor.data = torch.tensor([5.0])
    assert torch.autograd.grad(product, x)[0].item() == 5.0


@pytest.mark.parametrize("build", [linear_stage, normed_stage])
def test_an_optimizers_step_is_refused(build: Callable[[], torch.nn.Module]) -> None:
    outcome = run_trap(build, step_optimizer)
    assert outcome.refusal is not None
    assert "modified by an inplace operation" in outcome.refusal
    assert "is at version" in outcome.refusal
    assert math.isnan(outcome.error)


@pytest.mark.parametrize("build", [linear_stage, normed_stage])
def test_copying_into_data_is_silently_wrong(build: Callable[[], torch.nn.Module]) -> None:
    outcome = run_trap(build, copy_into_data)
    assert outcome.refusal is None
    assert 1e-3 < outcome.error < 1
    # Nor is it the gradient at the new weights.
    assert 1e-3 < outcome.error_at_new < 1


def test_the_updates_themselves_agree() -> None:
    """All three write the same weights; only the graph in flight differs."""
    found = []
    for update in (replace_data, step_optimizer, copy_into_data):
        module = normed_stage()
        update(module, [torch.ones_like(p) for p in module.parameters()])
        found.append([p.detach().clone() for p in module.parameters()])
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*found, strict=True))


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    traps.main()
    lines = capsys.readouterr().out.splitlines()
    assert sum("0 exactly" in line for line in lines) == 1
    assert sum("autograd refuses" in line for line in lines) == 2
    assert sum("no word of warning" in line for line in lines) == 3
