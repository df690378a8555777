"""A loss or gradient that is not finite stops the run there, or is left out, as was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import SMALL, heavy_pool, only_record, script, settings
from tests.e2e.support import assert_refused, metrics, run_folders

EVERY, BAD, NUM_STEPS = 3, 5, 8
NAME = "blocks.1.mlp_in.weight"
NATIVE = {"dp": {}, "pp": {"num_microbatches": 2, "micro_batch_size": 2}}
DEEPSPEED = {"zero1": {}}


def arguments(strategy: str, output_dir: Path, **changes: object) -> list[str]:
    values = {
        **SMALL,
        "strategy": strategy,
        "max_steps": NUM_STEPS,
        "checkpoint_every": EVERY,
        **{**NATIVE, **DEEPSPEED}[strategy],
        "output_dir": output_dir,
        **changes,
    }
    return settings(values)


def fail(strategy: str, output_dir: Path, *steps: int, **changes: object) -> str:
    """What the processes of a run say that fails after these steps."""
    job = {"name": NAME, "steps": steps, "arguments": arguments(strategy, output_dir, **changes)}
    with pytest.raises(RuntimeError, match=r"exit codes \[1, 1\]") as caught:
        heavy_pool().call("tests.e2e.fault_cases:with_bad_gradient", job, num_processes=2)
    return str(caught.value)


def finish(strategy: str, output_dir: Path, *steps: int, **changes: object) -> Path:
    """The folder of a run that gets over them."""
    job = {"name": NAME, "steps": steps, "arguments": arguments(strategy, output_dir, **changes)}
    heavy_pool().call("tests.e2e.fault_cases:with_bad_gradient", job, num_processes=2)
    assert only_record(output_dir)["status"] == "ok"
    (run_dir,) = run_folders(output_dir)
    return run_dir


def weights(run_dir: Path) -> bytes:
    return (run_dir / "hf" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("strategy", [*NATIVE, *DEEPSPEED])
def test_the_run_stops_at_that_step_and_keeps_the_last_good_checkpoint(strategy, tmp_path):
    said = fail(strategy, tmp_path, BAD)
    record = only_record(tmp_path)
    (run_dir,) = run_folders(tmp_path)
    assert (record["status"], record["step"]) == ("failed", BAD)
    assert [row["step"] for row in metrics(run_dir)] == list(range(1, BAD + 1))
    assert [path.name for path in run_dir.glob("checkpoints/*")] == [f"step-{EVERY:08d}"]
    assert not (run_dir / "hf").exists()
    error = record["error"]
    assert said.count(f"error: {error}") == 1
    assert "Traceback" not in said
    where = f"the first gradient that is not finite is of {NAME} on rank"
    assert error.startswith(f"step {BAD}: {where if strategy in NATIVE else 'the loss is not'}")
    assert ("on ranks 0, 1; " in error) == (strategy == "dp")
    if strategy == "zero1":
        assert "the loss is not finite on rank 1; " in error
    assert "--resume auto --on_nonfinite rollback" in error


@pytest.mark.parametrize("strategy", ["dp", "zero1"])
def test_skip_and_rollback_are_a_run_without_that_batch(strategy, tmp_path):
    job = {"step": BAD, "arguments": arguments(strategy, tmp_path / "reference")}
    heavy_pool().call("tests.e2e.fault_cases:without_step", job, num_processes=2)
    (reference,) = run_folders(tmp_path / "reference")
    expected = weights(reference)
    for how in ("skip", "rollback") if strategy in NATIVE else ("rollback",):
        run_dir = finish(strategy, tmp_path / how, BAD, on_nonfinite=how)
        assert weights(run_dir) == expected, how
        assert only_record(tmp_path / how)["skipped_steps"] == [BAD]


def test_rollback_is_done_once_and_from_a_checkpoint(tmp_path):
    # Steps are counted as they are done: 5, back to 3, 4, over 5, 6.
    fail("dp", tmp_path / "twice", BAD, BAD + 2, on_nonfinite="rollback")
    assert "after step 5 was passed over" in only_record(tmp_path / "twice")["error"]
    fail("dp", tmp_path / "early", EVERY - 1, on_nonfinite="rollback")
    assert "nothing was saved before" in only_record(tmp_path / "early")["error"]


def test_skip_gives_up_where_no_step_is_finite(tmp_path):
    fail("dp", tmp_path, *range(2, 40), on_nonfinite="skip", epochs=3, max_steps=-1)
    record = only_record(tmp_path)
    assert (record["step"], record["skipped_steps"]) == (12, list(range(2, 13)))
    assert ", as in the 10 steps before" in record["error"]


def test_skip_is_refused_where_the_engine_updates_by_itself(tmp_path):
    result = script({**SMALL, "strategy": "zero2", "on_nonfinite": "skip", "output_dir": tmp_path})
    assert_refused(result, "on_nonfinite='skip'", "zero2", "rollback")
