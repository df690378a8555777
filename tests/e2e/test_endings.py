"""Runs whose terminal, reader or disk goes away."""

from __future__ import annotations

import signal
import subprocess

import pytest

from tests.conftest import SMALL, heavy_pool, only_record, settings
from tests.e2e.support import (
    launcher_command,
    metrics,
    processes_with,
    run_folders,
    running,
    wait_for,
)

LONG = {**SMALL, "strategy": "dp", "num_samples": 1200, "epochs": 80, "checkpoint_every": 20}


def test_a_reader_that_went_changes_nothing_and_a_hang_up_saves(tmp_path):
    log, output_dir = tmp_path / "log", tmp_path / "runs"
    command = launcher_command("spawn", {**LONG, "output_dir": output_dir})
    shell = ["sh", "-c", '{ "$@"; echo $? > ' + f"{tmp_path}/code; }} 2>&1 | head -1", "sh"]
    with running([*shell, *command], log, E2E_TEST=str(tmp_path)) as process:
        wait_for(lambda: list(output_dir.glob("*/checkpoints/step-0000004*")), process, log)
        lines = {found: found.cmdline() for found in processes_with("E2E_TEST", str(tmp_path))}
        (launcher,) = (
            found
            for found, line in lines.items()
            if line[0] != "sh" and "--num_gpus" in line and "--run_dir" not in line
        )
        launcher.send_signal(signal.SIGHUP)
        process.wait(timeout=60)
    assert len(log.read_text().splitlines()) == 1, "its first line was read"
    assert (tmp_path / "code").read_text() == "129\n"
    (run_dir,) = run_folders(output_dir)
    record = only_record(output_dir)
    assert record["status"] == "interrupted"
    assert [row["step"] for row in metrics(run_dir)] == list(range(1, record["step"] + 1))
    assert (run_dir / "checkpoints" / f"step-{record['step']:08d}").is_dir()


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of 64 MiB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", tmp_path], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"a disk of its own needs root: {mounted.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)


def assert_ends_without_room(how: str, strategy: str, folder: str) -> None:
    """A run that saves after 3 steps, and then has no room to save after 6."""
    values = {**SMALL, "strategy": strategy, "checkpoint_every": 3, "output_dir": folder}
    job = {"how": how, "disk": str(folder), "arguments": settings(values)}
    with pytest.raises(RuntimeError) as caught:
        heavy_pool().call("tests.e2e.fault_cases:with_full_disk", job, num_processes=2)
    record, said = only_record(folder), str(caught.value)
    (run_dir,) = (path for path in run_folders(folder) if path.is_dir())
    assert record["status"] == "failed"
    assert "is full; " in record["error"]
    assert record["error"].endswith("make room, then go on with --resume auto")
    assert f"error: {record['error']}" in said
    assert "Traceback" not in said
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-00000003"]
    hidden = {
        path.name for where in (run_dir, run_dir / "checkpoints") for path in where.glob(".*")
    }
    assert hidden == {".owner.json", ".faults"}, "nothing half-written"


def test_a_full_disk_is_said_and_leaves_what_was_saved(small_disk):
    assert_ends_without_room("full", "fsdp", small_disk)


def test_a_limit_of_file_sizes_is_a_full_disk(tmp_path):
    assert_ends_without_room("limit", "dp", tmp_path)
