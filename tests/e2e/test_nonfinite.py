"""Test that a non-finite loss or gradient stops the run. With `on_nonfinite` set to "skip", the run
must instead continue without the affected batch."""

import pytest

from tests.conftest import SMALL, only_record
from tests.e2e.support import final_weights, metrics, run_case, run_folders

EVERY, BAD, NUM_STEPS = 3, 5, 8
NAME = "blocks.1.mlp_in.weight"


def run(strategy, output_dir, case="with_bad_gradient", /, steps=(), step=None, **changes):
    """Train with the fault `case` from fault_cases.py, by default bad gradients in `steps`. Return
    "" if the run succeeds, and the output of all processes if it fails."""
    values = {**SMALL, "strategy": strategy, "max_steps": NUM_STEPS, "checkpoint_every": EVERY}
    values |= {"output_dir": output_dir, **changes}
    said = run_case(f"fault_cases:{case}", values, name=NAME, steps=steps, step=step)
    assert ("exit codes [1, 1]" in said) == bool(said)
    assert only_record(output_dir)["status"] == ("failed" if said else "ok")
    return said


@pytest.mark.parametrize("strategy", ["dp", "zero1"])
def test_a_run_stops_at_a_non_finite_step_and_keeps_the_last_good_checkpoint(strategy, tmp_path):
    said = run(strategy, tmp_path, steps=[BAD])
    record = only_record(tmp_path)
    (run_dir,) = run_folders(tmp_path)
    assert [row["step"] for row in metrics(run_dir)] == list(range(1, BAD + 1))
    assert [path.name for path in run_dir.glob("checkpoints/*")] == [f"step-{EVERY:08d}"]
    assert not (run_dir / "hf").exists()
    error = record["error"]
    assert said.count(f"error: {error}") == 1
    assert "Traceback" not in said
    first = f"the first non-finite gradient is {NAME} on rank"
    where = {"dp": f"{first} 0, and {first} 1. ", "zero1": "the loss is not finite on rank 1. "}[
        strategy
    ]
    assert error.startswith(f"step {BAD}: {where}")
    assert ("--on_nonfinite skip" in error) == (strategy == "dp")


def test_skip_equals_a_run_without_the_bad_batch(tmp_path):
    assert not run("dp", tmp_path / "reference", "without_step", step=BAD)
    assert not run("dp", tmp_path / "skip", steps=[BAD], on_nonfinite="skip")
    (reference,) = run_folders(tmp_path / "reference")
    (skipping,) = run_folders(tmp_path / "skip")
    assert final_weights(skipping) == final_weights(reference)
    assert only_record(tmp_path / "skip")["skipped_steps"] == [BAD]
