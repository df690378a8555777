"""What trackers are sent: TensorBoard's files read back, the others' own interfaces recorded."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import ModuleType

import pytest

from distributed_training.records.metrics import build_tracker, final_values
from tests.support import made_record

ROW = {
    "step": 7, "epoch": 0, "loss": 2.5, "learning_rate": 1e-3, "grad_norm": None, "skipped": True,
    "num_targets": 64, "step_time_s": 0.5, "tokens_per_s": 128.0,
}  # fmt: skip
EVALUATION = {"step": 8, "loss": 2.0, "perplexity": 7.4}
PEAKS = {"peak_allocated_bytes": None, "peak_host_bytes": 3 * 2**30}
ABOUT = {"seed": 1, "max_grad_norm": None, "model": "gpt2-tiny", "pack": True}
STEP = {
    "train/loss": 2.5, "train/perplexity": pytest.approx(math.exp(2.5)),
    "train/learning_rate": 1e-3, "speed/tokens_per_s": 128.0, "speed/step_time_s": 0.5,
}  # fmt: skip
EVALUATED = {"eval/loss": 2.0, "eval/perplexity": 7.4, "memory/peak_host_gib": 3.0}
FINAL = {
    "final/loss": 3.0625, "final/validation_loss": 3.0, "final/perplexity": 20.0625,
    "final/tokens_per_s": 131072.0, "final/peak_memory_gib": 12.0,
}  # fmt: skip


def track(log_to, folder):
    """A short run under this tracker."""
    tracker = build_tracker(log_to, folder, ABOUT)
    tracker.log_step(ROW)
    tracker.log_evaluation(EVALUATION, PEAKS)
    tracker.close(final_values(made_record()))


def test_tensorboard_shows_the_numbers_in_groups(tmp_path):
    package = pytest.importorskip("tensorboard", reason="tests/requirements.txt has it")
    assert package
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = {
        (name, event.step): event.value
        for name in events.Tags()["scalars"]
        for event in events.Scalars(name)
    }
    wanted = {(name, 7): value for name, value in STEP.items()}
    wanted |= {(name, 8): value for name, value in EVALUATED.items()}
    wanted[("train/perplexity", 7)] = math.exp(2.5)
    assert {key: found.pop(key) for key in wanted} == pytest.approx(wanted)
    assert {name: value for (name, _), value in found.items()} == pytest.approx(FINAL)
    hparams = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    for word in (b"seed", b"max_grad_norm", b"gpt2-tiny"):
        assert word in hparams


# wandb 0.31, mlflow 3.17's fluent interface, trackio 0.43
BEGUN = {"project": "distributed-training", "name": "run", "config": ABOUT}
ROWS = [("log", STEP, 7), ("log", EVALUATED, 8), ("log", FINAL), ("finish",)]
CALLS = {
    "wandb": [("init", {**BEGUN, "dir": "run"}), *ROWS],
    "trackio": [("init", BEGUN), *ROWS],
    "mlflow": [
        ("set_experiment", "distributed-training"), ("start_run", {"run_name": "run"}),
        ("log_params", ABOUT), *(("log_metrics", *row[1:]) for row in ROWS[:3]), ("end_run",),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_packages_are_called_by_their_own_interfaces(name, tmp_path, monkeypatch):
    """Which are not installed: what is called of them, in order, by the names of keywords."""
    calls = []

    def answer(method):
        def call(*values, **named):
            calls.append((method, *values, *([named] if named else [])))

        return call

    fake = ModuleType(name)
    fake.__getattr__ = answer
    monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.chdir(tmp_path)
    track(name, Path("run"))
    assert calls == CALLS[name]
