"""The weights that keep_best keeps, those of checkpoints, and the samples around training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from distributed_training.plan.data import load_plan_data
from distributed_training.plan.plan import load_plan
from tests.conftest import SMALL, assert_ok, heavy_pool, only_record, train
from tests.e2e.support import assert_refused

# The rate is so high that the last evaluation is not the best.
NOISY = {"learning_rate": 0.03, "lr_schedule": "constant", "warmup_steps": 0, "eval_every": 1,
         "max_steps": 6}  # fmt: skip


def run(folder, strategy, **changes):
    values = {**SMALL, **NOISY, "strategy": strategy, "output_dir": folder, **changes}
    result = train(values, num_processes=2)
    assert_ok(result)
    return only_record(folder), result.stdout


def validation_loss(run_dir, folder):
    """Mean loss of the weights in `folder` over the run's validation samples, in one process."""
    plan = load_plan(run_dir)
    samples = load_plan_data(plan)[0].validation
    model = plan.model.build(dropout=0.0, seed=0)
    plan.model.load(model, folder)
    with torch.no_grad():
        arrays = map(torch.from_numpy, samples.batch(range(len(samples))))
        return float(model.eval()(*arrays).sum()) / int(samples.lengths.sum())


@pytest.mark.parametrize("strategy", ["fsdp", "pp"])
def test_the_best_weights_are_those_of_the_lowest_validation_loss(strategy, tmp_path):
    record, _ = run(tmp_path / "best", strategy, keep_best=True)
    run_dir = Path(record["run_dir"])
    trained = [entry for entry in record["evaluations"] if entry["step"] > 0]
    lowest = min(trained, key=lambda entry: entry["loss"])
    assert lowest["step"] < trained[-1]["step"], "the test needs a run that gets worse"
    assert record["best"]["step"] == lowest["step"]
    assert validation_loss(run_dir, run_dir / "best") == pytest.approx(lowest["loss"], rel=1e-5)
    last = validation_loss(run_dir, run_dir / "hf")
    assert last == pytest.approx(trained[-1]["loss"], rel=1e-5)
    assert (run_dir / "best" / "README.md").read_text().count(f"after step {lowest['step']},") == 1


def test_the_text_before_training_is_that_of_the_initial_weights(tmp_path):
    """And neither drawing it nor keeping the best weights changes training."""
    record, out = run(tmp_path / "a", "zero3", max_steps=2, generate="def ", keep_best=True)
    assert record["sample_before"].startswith("def ")
    assert record["sample_before"] != record["sample"]
    assert out.index("sample before training:") < out.index("step      0/2")
    silent, out = run(tmp_path / "silent", "zero3", max_steps=2, generate=None)
    assert silent["best"] is silent["sample_before"] is silent["sample"] is None
    assert "sample" not in out.partition("step      0")[2]
    assert silent["loss_curve"] == record["loss_curve"]


def export(*words):
    return heavy_pool().script(["export", *words])


def test_an_interrupted_run_is_exported_from_its_checkpoint(tmp_path):
    """Here one that was killed after it had saved: its last weights are in hf/ to compare with."""
    changes = {"checkpoint_every": 2, "keep_checkpoints": 2, "max_steps": 4}
    record, _ = run(tmp_path / "runs", "zero3", **changes, learning_rate=1e-4)
    run_dir = Path(record["run_dir"])
    (run_dir / "hf").rename(tmp_path / "expected")
    (run_dir / "record.json").write_text(json.dumps({**record, "status": "running"}))
    words = ["generate", run_dir, "--prompt", "def ", "--num_tokens", 5]
    from_checkpoint = heavy_pool().script(words)
    assert "no hf/ yet" in from_checkpoint.stderr
    result = export(run_dir)
    assert_ok(result)
    assert heavy_pool().script(words).stdout == from_checkpoint.stdout
    assert result.stdout.startswith("exported ")
    assert "/hf (Hugging Face's format, after step 4)" in result.stdout
    for file in (tmp_path / "expected").iterdir():
        assert (run_dir / "hf" / file.name).read_bytes() == file.read_bytes(), file.name
    assert_refused(export(run_dir), "hf is there already", "--to")
    older = run_dir / "checkpoints" / "step-00000002"
    assert_ok(export(older, "--to", tmp_path / "older"))
    assert "after step 2" in (tmp_path / "older" / "README.md").read_text()
    other = load_file(tmp_path / "older" / "model.safetensors")
    for name, weight in load_file(tmp_path / "expected" / "model.safetensors").items():
        assert other[name].shape == weight.shape
        assert not torch.equal(other[name], weight), name
    assert_refused(export(tmp_path), "holds no checkpoint", "runs/latest")
