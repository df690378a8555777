"""Test runs in which a rank hangs, fails or is killed, the launcher is killed, or the disk is full.
Such a run must soon end, leave no processes behind, and record the reason."""

import json
import platform
import re
import signal
import subprocess

import pytest

from distributed_training.records.record import LOST_PEER
from tests.conftest import (
    SCRIPT,
    SMALL,
    assert_ok,
    heavy_pool,
    only_record,
    run_command,
    script,
    settings,
)
from tests.e2e.support import (
    FAULT_SCRIPT,
    assert_refused,
    launcher_command,
    remaining_processes,
    run_case,
    run_folders,
    running,
    wait_for,
)

LIMIT_S = 150  # time limit of a run; on an idle machine, a run needs a tenth of it
LONG = {**SMALL, "strategy": "dp", "num_samples": 1200, "epochs": 80, "checkpoint_every": 20}


def fault(kind, folder):
    """Return the variable that injects a fault in step 5 of rank 1, or in its next save. `folder`
    is for soak_worker.py, and is on the disk that the fault may fill."""
    job = {"folder": str(folder), "disk": str(folder), "kind": kind, "rank": 1, "step": 5}
    return {"FAULT": json.dumps(job)}


def test_a_rank_that_hangs_is_named(tmp_path):
    log, output_dir = tmp_path / "log", tmp_path / "runs"
    values = {**LONG, "output_dir": output_dir, "hang_timeout_s": 10}
    with running(launcher_command("faulty", values), log, **fault("hangs", tmp_path)) as process:
        assert process.wait(timeout=LIMIT_S) == 1, log.read_text()
        assert remaining_processes(str(output_dir)) == []
    said = log.read_text()
    record = only_record(output_dir)
    assert record["status"] == "failed"
    waiting = r"waiting for rank 1, which is in step 5 at loop.py:\d+ _run_step"
    error = rf"step 5 has hung for 1\d s: {waiting}"
    assert re.match(error, record["error"])
    for words in (error, rf"note: step 5 has taken .*{waiting}"):
        assert re.search(words, said)


def run_with_fault(values, kind, folder):
    """Run two warm processes, as a launcher would start them, and return their output."""
    options = {"num_processes": 2, "script": FAULT_SCRIPT, **fault(kind, folder)}
    return heavy_pool().script(settings(values), **options)


def test_the_error_of_the_rank_that_fails_is_recorded(tmp_path):
    result = run_with_fault({**LONG, "output_dir": tmp_path / "runs"}, "fails", tmp_path)
    record = only_record(tmp_path / "runs")
    error = "RuntimeError: a fault made on purpose"
    assert (record["status"], record["error"]) == ("failed", f"rank 1: {error}")
    assert "Traceback (most recent call last):\n  File" in result.stderr
    assert error in result.stderr


def test_a_slow_disk_is_no_hang_but_one_that_answers_no_more(tmp_path):
    """The limit holds for each file, so three files may take longer."""
    job = {"folder": str(tmp_path), "kind": "slow disk", "rank": 0, "step": 4}
    values = {**SMALL, "strategy": "dp", "output_dir": tmp_path / "runs", "hang_timeout_s": 6}
    run_command(launcher_command("faulty", values), FAULT=json.dumps(job))
    record = only_record(tmp_path / "runs")
    assert record["status"] == "failed"
    assert re.match("the export has hung .* waiting for rank 0", record["error"])
    assert (tmp_path / "slow").read_text() == "4"


def test_a_rank_killed_under_torchrun_is_a_failure_and_no_interruption(tmp_path):
    """torchrun terminates the other ranks, but its signal is not the reason why the run ends. A job
    script must not queue the run again."""
    output_dir = tmp_path / "runs"
    command = launcher_command("torchrun", {**LONG, "output_dir": output_dir})
    command[command.index(str(SCRIPT))] = str(FAULT_SCRIPT)
    result = run_command(command, **fault("killed", tmp_path))
    assert "SIGKILL" in result.stderr
    record = only_record(output_dir)
    assert (record["status"], LOST_PEER in record["error"]) == ("failed", True)


def test_a_run_ends_soon_after_its_launcher_was_killed(tmp_path):
    log, output_dir = tmp_path / "log", tmp_path / "runs"
    # The second run may read a checkpoint when the first has saved others.
    values = {**LONG, "strategy": "zero2", "output_dir": output_dir, "keep_checkpoints": 99}
    values["resume"] = "auto"
    with running(launcher_command("spawn", values), log) as process:
        wait_for(lambda: list(output_dir.glob("*/checkpoints/step-*")), process, log)
        second = script(values, "--num_gpus", "2")
        assert_refused(second, str(run_folders(output_dir)[0]), platform.node())
        assert len(run_folders(output_dir)) == 1
        process.kill()  # a zombie process counts as dead
        assert remaining_processes(str(output_dir)) == []
        (run_dir,) = run_folders(output_dir)
        record = only_record(output_dir)
        assert record["status"] == "interrupted"
        assert (run_dir / "checkpoints" / f"step-{record['step']:08d}").is_dir()
    rest = {**values, "max_steps": -1}
    resumed = script(rest, "--num_gpus", "2", "--dry-run")
    assert_ok(resumed)
    assert f"resumes from: {run_dir}/checkpoints/step-{record['step']:08d}" in resumed.stdout


def test_a_signal_inside_a_library_call_is_reported_as_an_interruption(tmp_path):
    values = {**SMALL, "strategy": "dp", "output_dir": tmp_path}
    said = run_case("fault_cases:with_a_signal_in_a_library", values, 1)
    assert f"exit codes [{128 + signal.SIGINT}]" in said
    assert "Stopped. Nothing was saved." in said
    assert "Traceback" not in said
    assert only_record(tmp_path)["status"] == "interrupted"


@pytest.fixture
def small_disk(tmp_path):
    """Mount a 64 MiB disk and return its mount point."""
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", tmp_path]
    mounted = subprocess.run(command, capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a disk of its own needs root: {mounted.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)


def test_a_full_disk_is_reported_and_keeps_saved_checkpoints(small_disk):
    """The run saves a checkpoint after step 3. After step 6, the disk is too full for another
    checkpoint."""
    output_dir = small_disk / "runs"
    values = {**SMALL, "strategy": "fsdp", "checkpoint_every": 3, "output_dir": output_dir}
    result = run_with_fault(values, "disk full", small_disk)
    said = result.stderr
    record = only_record(output_dir)
    (run_dir,) = run_folders(output_dir)
    assert record["status"] == "failed"
    assert "--resume auto" in record["error"]
    assert f"error: {record['error']}" in said
    assert "Traceback" not in said
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-00000003"]
    assert {path.name for path in run_dir.rglob(".*")} == {".owner.json"}, "nothing half-written"
