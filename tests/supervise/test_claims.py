"""Test the claim on a run's folder."""

import fcntl
import os
import subprocess
import sys
import time

import pytest

from distributed_training.settings.errors import RunError, UserError
from distributed_training.supervise import claims
from tests.conftest import clean_environment
from tests.support import refused

# The process that starts a run, and rank 0. The test kills the first when the second has the claim.
STARTER = """
import pathlib, subprocess, sys, time
from distributed_training.supervise import claims
claims.claim(pathlib.Path(sys.argv[1]), "first")
subprocess.run([sys.executable, "-c", sys.argv[2], sys.argv[1]])
"""
RANK_0 = """
import os, pathlib, sys, time
from distributed_training.supervise import claims
claims.hold(pathlib.Path(sys.argv[1]))
print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_a_run_folder_is_claimed_until_its_last_process_has_ended(tmp_path):
    """Rank 0 keeps the claim after the process that started it has been killed."""
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(tmp_path), RANK_0],
        stdout=subprocess.PIPE, text=True, env=clean_environment(),
    )  # fmt: skip
    rank = int(starter.stdout.readline())
    starter.kill()
    starter.wait()
    for run_id in ("first", "second"):
        with refused(str(tmp_path), "resume=None"):
            claims.claim(tmp_path, run_id)
    os.kill(rank, 9)
    end = time.monotonic() + 30
    while True:
        try:
            claims.claim(tmp_path, "second")
            break
        except UserError:
            assert time.monotonic() < end
            time.sleep(0.01)
    claims.check(tmp_path, "second")
    with pytest.raises(RunError, match=str(tmp_path)):
        claims.check(tmp_path, "first")


@pytest.mark.parametrize("has_locks", [True, False])
def test_without_a_visible_lock_the_latest_run_owns_the_folder(has_locks, tmp_path, monkeypatch):
    """The lock of another machine may be invisible, or the file system has none."""

    def flock(descriptor, operation):
        if not has_locks:
            raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    for run_id in ("first", "second"):
        claims.claim(tmp_path, run_id)
    claims.check(tmp_path, "second")
    with pytest.raises(RunError, match=str(tmp_path)):
        claims.check(tmp_path, "first")


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b'{"host": 1}'])
def test_a_damaged_owner_file_does_not_prevent_a_claim(content, tmp_path):
    (tmp_path / claims.OWNER_FILE).write_bytes(content)
    claims.claim(tmp_path, "first")
    assert claims.read_owner(tmp_path)["run_id"] == "first"


def test_a_removed_folder_is_named(tmp_path):
    with pytest.raises(RunError, match=str(tmp_path)):
        claims.check(tmp_path / "removed", "first")
