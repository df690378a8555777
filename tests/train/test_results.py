"""Test which step results are non-finite, and how many are skipped."""

import math
from types import SimpleNamespace

import pytest
import torch

from distributed_training.engines.base import StepResult
from distributed_training.records.record import History
from distributed_training.settings.request import build_config
from distributed_training.settings.strategies import load_strategy
from distributed_training.train.loop import (
    MAX_CONSECUTIVE_SKIPS,
    StepResults,
    has_nonfinite_gradients,
)

pytestmark = pytest.mark.usefixtures("process_group")
NAMES = ["blocks.0.qkv.weight", "blocks.1.qkv.weight", "norm_out.weight"]


def make_results(model=None, **config):
    config = build_config({"strategy": "dp", **config})
    kind = SimpleNamespace(stacks={"experts": (2, 3, 3)} if model else {})
    size = SimpleNamespace(kinds=(kind,), num_layers=2)
    plan = SimpleNamespace(config=config, strategy=load_strategy(config), size=size)
    engine = SimpleNamespace(gradient_names=NAMES, model=model or torch.nn.Module())
    step_results = StepResults(plan, History(), engine, torch.device("cpu"))
    step_results.restart()
    return step_results


@pytest.mark.parametrize(
    ("norm", "skipped", "precision", "expected"),
    [
        (1.0, False, "fp32", False),
        (math.nan, False, "fp32", True),
        (math.inf, False, "bf16", True),
        (-1.0, False, "bf16", True),  # an engine's value for a norm that is not finite
        (None, False, "bf16", False),
        (None, True, "fp16", False),  # the loss scale overflowed
        (None, True, "bf16", True),
    ],
)
def test_gradients_that_are_not_finite(norm, skipped, precision, expected):
    result = StepResult(torch.tensor(1.0), norm, skipped)
    config = build_config({"precision": precision})
    assert has_nonfinite_gradients(result, config) == expected


def test_skipped_steps_are_limited():
    step_results = make_results(on_nonfinite="skip")
    last = MAX_CONSECUTIVE_SKIPS + 1
    for step in range(1, last + 1):
        result = StepResult(torch.tensor(1.0), torch.tensor(math.nan), False, torch.ones(3))
        step_results.add({"step": step, "num_tokens": 4, "num_targets": 2}, result)
        rows, fault = step_results.flush()
        assert rows[0]["skipped"]
        assert (fault is not None) == (step == last)
    assert step_results.history.skipped_steps == list(range(1, last + 1))


def test_load_is_that_of_the_most_loaded_expert():
    blocks = torch.nn.ModuleList([torch.nn.Module(), torch.nn.Module()])
    for block, ends in zip(blocks, ([10, 40], [20, 40]), strict=True):
        block.register_buffer("latest_ends", torch.tensor(ends))
    step_results = make_results(torch.nn.ModuleDict({"blocks": blocks}))
    row = {"step": 1, "num_tokens": 4, "num_targets": 2}
    step_results.add(row, StepResult(torch.tensor(1.0), torch.tensor(1.0), False))
    step_results.flush()
    assert row["expert_load"] == step_results.history.expert_load == 1.5
