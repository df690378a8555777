"""Train on pairs of answers as a user does: look at them, train, resume, evaluate."""

import json
import math

import numpy as np
import pytest

from distributed_training.train.reference import REFERENCE_FILE
from tests.conftest import SMALL, assert_ok, heavy_pool, train
from tests.e2e.support import assert_refused, final_weights, metrics, run_folders
from tests.e2e.test_faults import run_with_fault
from tests.support import small_pairs, small_text

VALUES = {
    **SMALL,
    "dataset": str(small_pairs()),
    "num_samples": -1,
    "max_length": 64,
    "preference": "dpo",
    "lr_schedule": "constant",
    "warmup_steps": 0,
    "batch_size": 4,
    "max_steps": 6,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("whole")
    result = train({**VALUES, "strategy": "dp", "output_dir": output_dir})
    assert_ok(result)
    assert "accuracy" in result.stdout
    return run_folders(output_dir)[0]


def test_both_answers_are_shown():
    options = ["--dataset", small_pairs(), "--preference", "dpo", "--max_length", 64, "--show", 1]
    options += ["--model", "gpt2-tiny", "--tokenizer", "embedded"]
    result = heavy_pool().script(["data", *options])
    assert_ok(result)
    row = json.loads(small_pairs().read_text().splitlines()[0])
    for name in ("chosen", "rejected"):
        assert f"--- sample 1 {name}: " in result.stdout
        assert f"{row['prompt']}«{row[name]}<|endoftext|>»" in result.stdout
    found = json.loads(heavy_pool().script(["data", *options, "--json"]).stdout)
    assert [sample["answer"] for sample in found["samples"]] == ["chosen", "rejected"]


def test_a_run_begins_with_the_reference_and_reports_rewards(trained):
    first, *rows = metrics(trained)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["reward_margin"] == pytest.approx(0, abs=1e-6)
    assert first["num_targets"] == 4
    assert all(0 <= row["reward_accuracy"] <= 1 for row in rows)
    for row in rows:
        margin = row["reward_chosen"] - row["reward_rejected"]
        assert row["reward_margin"] == pytest.approx(margin, abs=1e-6)
    record = json.loads((trained / "record.json").read_text())
    before, *_, last = record["evaluations"]
    assert before["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert last["reward_margin"] != 0
    assert record["data"]["unit"] == "pairs"
    reference = json.loads((trained / REFERENCE_FILE).read_text())
    counts = {name: len(reference[name]) for name in ("train", "validation")}
    assert counts == {name: record["data"][f"num_{name}_samples"] for name in counts}


@pytest.mark.parametrize("damage", ["none", "removed", "other pairs"])
def test_a_resumed_run_keeps_its_reference(damage, trained, tmp_path):
    values = {**VALUES, "strategy": "dp", "output_dir": tmp_path, "checkpoint_every": 3}
    assert_ok(train({**values, "max_steps": 3, "eval_samples": 2}))
    (run_dir,) = run_folders(tmp_path)
    file = run_dir / REFERENCE_FILE
    stored = json.loads(file.read_text())
    if damage == "removed":
        file.unlink()
    elif damage == "other pairs":
        (ids,) = (name for name in stored if name.startswith("train "))
        stored[ids] = stored[ids][::-1]
        others = [[0.0, 0.0] for _ in stored["train"]]
        file.write_text(json.dumps({**stored, "train": others}))
    # Another strategy also computes the reference, if it must, with the initial weights.
    changes = {"strategy": "fsdp", "batch_size": 2} if damage == "removed" else {}
    count = 2 if changes else 1
    result = train({**values, **changes, "resume": run_dir}, num_processes=count)
    assert_ok(result)
    rows, whole = metrics(run_dir), metrics(trained)
    for key in ("loss", "reward_margin", "logps_chosen"):
        expected = [row[key] for row in whole]
        assert [row[key] for row in rows] == pytest.approx(expected, rel=1e-5, abs=1e-6)
    found = json.loads(file.read_text())
    np.testing.assert_allclose(found["train"], stored["train"], rtol=1e-6)
    assert len(found["validation"]) > 2


def test_a_run_killed_in_the_reference_pass_can_be_repeated(tmp_path):
    values = {**VALUES, "strategy": "fsdp", "batch_size": 2, "checkpoint_every": 3}
    whole, output_dir = tmp_path / "whole", tmp_path / "runs"
    assert_ok(train({**values, "output_dir": whole}, num_processes=2))
    values |= {"output_dir": output_dir, "resume": "auto"}
    assert_ok(train({**values, "max_steps": 3}, num_processes=2))
    (run_folders(output_dir)[0] / REFERENCE_FILE).unlink()
    result = run_with_fault(values, "killed in the reference pass", tmp_path)
    assert result.returncode == 1
    assert (tmp_path / "struck").exists()
    assert not [*output_dir.glob(f"*/{REFERENCE_FILE}")]
    assert_ok(train(values, num_processes=2))
    (expected,), found = run_folders(whole), run_folders(output_dir)[-1]
    assert final_weights(found) == final_weights(expected)


def test_eval_needs_text(trained, tmp_path):
    pool = heavy_pool()
    (tmp_path / "a.txt").write_text(small_text().read_text()[:2000])
    assert_refused(pool.script(["eval", trained]), "pairs of answers", "--dataset")
    assert_ok(pool.script(["eval", trained, "--dataset", tmp_path / "a.txt"]))
