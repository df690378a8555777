"""Runs end with exit code 0, leave no process and no shared memory.

EXIT_RUNS=30 runs each launcher 30 times; test_launchers.py looks at runs of another strategy.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import SMALL, assert_ok, run_command
from tests.e2e.support import launcher_command, left_over, run_folders

NUM_RUNS = int(os.environ.get("EXIT_RUNS", "1"))
# "spawn" is --num_gpus 2, as in every run.sh.
STRATEGIES = {"python": "dp", "spawn": "zero2", "torchrun": "fsdp", "deepspeed": "zero3"}


@pytest.mark.parametrize("launcher", STRATEGIES)
@pytest.mark.timeout(150 * NUM_RUNS)
def test_every_run_of_a_launcher_ends_cleanly(launcher, tmp_path):
    values = {
        **SMALL,
        "strategy": STRATEGIES[launcher],
        "num_samples": 8,
        "eval_samples": 4,
        "output_dir": tmp_path,
    }
    before = shared_memory()
    for number in range(1, NUM_RUNS + 1):
        # With the number of threads that the script chooses.
        command = ["env", "-u", "OMP_NUM_THREADS", *launcher_command(launcher, values)]
        result = run_command(command, timeout_s=120, DS_ACCELERATOR="cpu")
        assert_clean_end(result, tmp_path)
        assert len(run_folders(tmp_path)) == number, "each run has its folder"
    end = time.monotonic() + 10  # for buffers of tests that run at the same time
    while not shared_memory() <= before and time.monotonic() < end:
        time.sleep(0.1)
    assert shared_memory() <= before, "DeepSpeed's reduction buffers stay until the next restart"


def assert_clean_end(result: subprocess.CompletedProcess[str], output_dir: Path) -> None:
    """Exit code 0, no abort at the interpreter's end, no process left."""
    assert_ok(result)
    assert "terminate called" not in result.stderr, result.stderr
    assert left_over(str(output_dir), patience_s=2) == []


def shared_memory() -> set[Path]:
    """DeepSpeed's buffers that have a name."""
    return set(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*"))
