"""Test which step results are non-finite, how many are skipped, and what a rollback restores."""

import math
from types import SimpleNamespace

import pytest
import torch

from distributed_training.engines.base import StepResult
from distributed_training.records.record import History
from distributed_training.settings.request import build_config
from distributed_training.train import loop
from distributed_training.train.loop import (
    MAX_CONSECUTIVE_SKIPS,
    StepResults,
    has_nonfinite_gradients,
)

pytestmark = pytest.mark.usefixtures("process_group")
NAMES = ["blocks.0.qkv.weight", "blocks.1.qkv.weight", "norm_out.weight"]


def make_results(tmp_path, **config):
    plan = SimpleNamespace(config=build_config(config), run_dir=tmp_path)
    engine = SimpleNamespace(gradient_names=NAMES)
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


def test_skipped_steps_are_limited(tmp_path):
    step_results = make_results(tmp_path, on_nonfinite="skip")
    last = MAX_CONSECUTIVE_SKIPS + 1
    for step in range(1, last + 1):
        result = StepResult(torch.tensor(1.0), torch.tensor(math.nan), False, torch.ones(3))
        step_results.add({"step": step, "num_tokens": 4, "num_targets": 2}, result)
        rows, fault = step_results.flush()
        assert rows[0]["skipped"]
        assert (fault is not None) == (step == last)
    assert step_results.history.skipped_steps == list(range(1, last + 1))


def test_a_rollback_restores_the_last_checkpoint_before_the_step_once(tmp_path, monkeypatch):
    steps = (3, 6, 9)  # 9 is of an earlier attempt
    folders = [tmp_path / f"checkpoints/step-{step:08d}" for step in steps]
    monkeypatch.setattr(loop, "list_checkpoints", lambda _: folders)
    step_results = make_results(tmp_path)
    assert step_results.build_error(8, "").rollback_checkpoint == folders[1]
    assert step_results.build_error(2, "").rollback_checkpoint is None
    step_results.skipped_step = 8
    assert step_results.build_error(10, "").rollback_checkpoint is None
