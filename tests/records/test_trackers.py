"""What trackers are sent: TensorBoard's files read back, the others' own interfaces recorded."""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace

import pytest

from distributed_training.records.trackers import build_tracker, final_values
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


@pytest.fixture
def calls(monkeypatch):
    """What was called of packages that are not installed, in order; signatures are theirs."""
    found = []

    def module(name, **functions):
        fake = ModuleType(name)
        vars(fake).update(functions)
        monkeypatch.setitem(sys.modules, name, fake)

    def saved(name):
        return lambda *values: found.append((name, *values))

    # wandb 0.31: init(entity, project, dir, id, name, ..., config), Run.log(data, step, commit)
    wandb_run = SimpleNamespace(
        log=lambda data, step=None, commit=None: saved("log")(data, step),
        summary=SimpleNamespace(update=saved("summary")),
        finish=lambda exit_code=None: saved("finish")(),
    )
    module(
        "wandb",
        init=lambda *, project, name, dir, config: (
            saved("init")(project, name, dir, config) or wandb_run
        ),
    )
    # mlflow 3.17's fluent interface
    module(
        "mlflow",
        set_experiment=lambda experiment_name=None, experiment_id=None: saved("set_experiment")(
            experiment_name
        ),
        start_run=lambda run_id=None, experiment_id=None, run_name=None: saved("start_run")(
            run_name
        ),
        log_params=lambda params, synchronous=None, run_id=None: saved("log_params")(params),
        log_metrics=lambda metrics, step=None: saved("log_metrics")(metrics, step),
        end_run=lambda status="FINISHED": saved("end_run")(),
    )
    # trackio 0.43
    module(
        "trackio",
        init=lambda project, name=None, group=None, *, config=None: saved("init")(
            project, name, config
        ),
        log=lambda metrics, step=None: saved("log")(metrics, step),
        finish=lambda: saved("finish")(),
    )
    return found


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


def test_wandb(calls, tmp_path):
    track("wandb", tmp_path)
    assert calls == [
        ("init", "distributed-training", tmp_path.name, str(tmp_path), ABOUT),
        ("log", STEP, 7), ("log", EVALUATED, 8), ("summary", FINAL), ("finish",),
    ]  # fmt: skip


def test_mlflow(calls, tmp_path):
    track("mlflow", tmp_path)
    assert calls == [
        ("set_experiment", "distributed-training"), ("start_run", tmp_path.name),
        ("log_params", ABOUT), ("log_metrics", STEP, 7), ("log_metrics", EVALUATED, 8),
        ("log_metrics", FINAL, None), ("end_run",),
    ]  # fmt: skip


def test_trackio(calls, tmp_path):
    track("trackio", tmp_path)
    assert calls == [
        ("init", "distributed-training", tmp_path.name, ABOUT),
        ("log", STEP, 7), ("log", EVALUATED, 8), ("log", FINAL, None), ("finish",),
    ]  # fmt: skip
