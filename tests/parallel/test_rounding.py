"""Weights that are rounded once a step, against a model whose weights are bf16 themselves."""

from __future__ import annotations

import copy

import pytest
import torch

from distributed_training.parallel.pipeline import RoundedWeights
from tests.parallel.test_zero_bubble import build, micro_batches


@pytest.fixture
def model():
    model = build("gpt2")
    model.compute_dtype = torch.bfloat16
    return model


def summed_gradients(model, batches):
    """Those of a bf16 copy of the model, each micro-batch's by itself, added up in fp32."""
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    sums = {name: torch.zeros(p.shape) for name, p in rounded.named_parameters()}
    for inputs, targets in batches:
        rounded.zero_grad()
        rounded(inputs, targets).backward()
        for name, parameter in rounded.named_parameters():
            assert parameter.grad.dtype == torch.bfloat16
            sums[name] += parameter.grad.float()
    return sums


def test_gradients_are_those_of_rounded_weights_added_up_in_fp32(model):
    before, batches = dict(model.named_parameters()), micro_batches(3)
    weights = RoundedWeights(model, torch.bfloat16)
    for _ in range(2):  # the second time from other weights
        expected = summed_gradients(model, batches)
        with weights:
            assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
            for inputs, targets in batches:
                model(inputs, targets).backward()
        assert all(p is before[name] for name, p in model.named_parameters())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                assert parameter.dtype == parameter.grad.dtype == torch.float32
                # The embedding is used at both ends, whose terms are added in fp32 here, in bf16
                # there; a pipeline's stages have one use each.
                used_twice = name == "token_embedding.weight"
                far = float(expected[name].abs().max()) / 64 if used_twice else 0.0
                torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=far)
                parameter -= 0.01 * parameter.grad
                parameter.grad = None


def test_an_error_leaves_the_fp32_parameters_in_place(model):
    with pytest.raises(ZeroDivisionError), RoundedWeights(model, torch.bfloat16):
        raise ZeroDivisionError
    assert {p.dtype for p in model.parameters()} == {torch.float32}
