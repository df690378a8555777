"""Start the runtime as a user would, and check that no processes are left behind."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

FOLDER = Path(__file__).resolve().parent.parent
SCRIPT = [sys.executable, "pipedream_runtime.py", "--device", "cpu"]
FAST = ["--forward_ms", "0", "--backward_ms", "0", "--check_weights", "False"]
# Environment variable that all processes inherit
MARKER = {"RUNTIME_TEST": str(os.getpid())}
ENVIRONMENT = os.environ | MARKER | {"PYTHONPATH": str(FOLDER)}


@pytest.fixture(autouse=True)
def no_process_is_left():
    """Check that all processes that a test started have ended after the test."""
    yield
    started = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # the process is not ours, or has just ended
            if MARKER.items() <= process.environ().items():
                started.append(process)
    _, alive = psutil.wait_procs(started, timeout=10)
    for process in alive:
        process.kill()
    assert not alive


def run(arguments, *, start=SCRIPT, limit_s=100, cwd=FOLDER):
    """Run a command and return the finished process. Raises subprocess.TimeoutExpired after the
    time limit."""
    return subprocess.run(
        [*start, *arguments], cwd=cwd, env=ENVIRONMENT, timeout=limit_s,
        capture_output=True, text=True,
    )  # fmt: skip


def last_line(text):
    return text.strip().splitlines()[-1]
