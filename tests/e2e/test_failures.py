"""When one rank fails, all end soon, and the record says why."""

from __future__ import annotations

import signal

import pytest

from tests.conftest import SMALL, assert_ok, heavy_pool, only_record, settings, train
from tests.e2e.support import (
    launcher_command,
    left_over,
    metrics,
    processes_with,
    run_folders,
    running,
    wait_for,
)

LIMIT_S = 150  # of a hang; alone on a machine it takes a tenth
LONG = {**SMALL, "num_samples": 1200, "epochs": 80}


def kill_rank_1(tmp_path):
    """Of the run that was started with E2E_TEST=tmp_path."""
    started = processes_with("E2E_TEST", str(tmp_path))
    (worker,) = (process for process in started if process.environ().get("RANK") == "1")
    worker.send_signal(signal.SIGKILL)


def test_ctrl_c_before_training_is_not_what_a_library_makes_of_it(tmp_path):
    job = {"arguments": settings({**SMALL, "strategy": "dp", "output_dir": tmp_path})}
    with pytest.raises(RuntimeError, match=r"exit codes \[130\]") as caught:
        heavy_pool().call("tests.e2e.fault_cases:with_ctrl_c_in_a_library", job, num_processes=1)
    assert "interrupted; nothing was trained" in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert only_record(tmp_path)["status"] == "interrupted"


def test_killed_rank_is_recorded_by_the_parent(tmp_path):
    log, output_dir = tmp_path / "log", tmp_path / "runs"
    values = {**LONG, "strategy": "pp", "grad_accum_steps": 2, "output_dir": output_dir}
    with running(launcher_command("spawn", values), log, E2E_TEST=str(tmp_path)) as process:
        wait_for(lambda: list(output_dir.glob("*/metrics.jsonl")), process, log)
        kill_rank_1(tmp_path)
        assert process.wait(timeout=LIMIT_S) == 1
        assert left_over(str(output_dir)) == []
    record = only_record(output_dir)
    assert record["status"] == "failed"
    reason = record["error"]
    assert log.read_text().splitlines()[-1] == f"failed: {reason}", "said last, not buried"
    assert reason == "rank 1: killed by SIGKILL; most often memory ran out", "not who lost it"


def test_a_run_starts_again_by_itself_and_ends_as_if_nothing_had_been(tmp_path):
    """With --max_restarts a process that is killed costs the steps since the last checkpoint."""
    log, output_dir = tmp_path / "log", tmp_path / "runs"
    values = {**SMALL, "strategy": "dp", "num_samples": 1200, "max_steps": 150}
    values["checkpoint_every"] = 50
    command = launcher_command("spawn", {**values, "output_dir": output_dir}, "--max_restarts", "1")
    with running(command, log, E2E_TEST=str(tmp_path)) as process:
        wait_for(lambda: list(output_dir.glob("*/checkpoints/step-*")), process, log)
        kill_rank_1(tmp_path)
        assert process.wait(timeout=2 * LIMIT_S) == 0, log.read_text()
    assert "note: started again (1), from step-000" in log.read_text()
    (run_dir,) = run_folders(output_dir)
    assert [row["step"] for row in metrics(run_dir)] == list(range(1, 151))
    assert_ok(train({**values, "output_dir": tmp_path / "whole"}, num_processes=2))
    (whole,) = run_folders(tmp_path / "whole")
    ours, theirs = ((run / "hf" / "model.safetensors").read_bytes() for run in (run_dir, whole))
    assert ours == theirs
