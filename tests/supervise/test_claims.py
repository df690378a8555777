"""Test the lock on a run directory."""

import json
import os
import platform
import subprocess
import sys
import threading
import time
from contextlib import nullcontext

import pytest

from distributed_training.settings.errors import RunError
from distributed_training.supervise import claims
from tests.conftest import clean_environment
from tests.support import refused

IDENTITY = {"strategy": "dp", "seed": 1}
# A launcher with one rank. The test kills the launcher after the rank has started.
LAUNCHER = """
import os, pathlib, sys, time
from distributed_training.supervise import claims
run_dir = pathlib.Path(sys.argv[1])
began, tell = os.pipe()
if rank := os.fork():
    claims.claim(run_dir, {"strategy": "dp", "seed": 1})
    os.write(tell, b"x")
else:
    os.read(began, 1)
    claims.hold(run_dir)
    print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _release_claims():
    yield
    for run_dir in list(claims._claim_fds):
        claims.release(run_dir)
    claims._claims.clear()
    claims._expired_claims.clear()


def claim_as(run_dir, **changes):
    run_dir.mkdir(exist_ok=True)
    claims.claim(run_dir, IDENTITY)
    file = run_dir / claims.OWNER_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_run_folder_is_claimed_until_its_last_process_has_ended(tmp_path):
    """A rank keeps the claim on the run folder after the rank's launcher has been killed."""
    run_dir = tmp_path / "a"
    run_dir.mkdir()
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(run_dir)],
        stdout=subprocess.PIPE, text=True, env=clean_environment(),
    )  # fmt: skip
    rank = int(launcher.stdout.readline())
    launcher.kill()
    launcher.wait()
    owner = f"Process {launcher.pid} on {platform.node()} started it"
    for refuse in (
        lambda: claims.refuse_held(run_dir),
        lambda: claims.claim(run_dir, IDENTITY),
        lambda: claims.refuse_duplicate_run(tmp_path, IDENTITY),
    ):
        with refused("is still in use", owner, "resume=None"):
            refuse()
    claims.refuse_duplicate_run(tmp_path, {**IDENTITY, "seed": 2})
    os.kill(rank, 9)
    end = time.monotonic() + 30
    while claims.is_locked(run_dir):
        assert time.monotonic() < end
        time.sleep(0.01)
    claims.refuse_duplicate_run(tmp_path, IDENTITY)
    for _ in range(2):
        claims.claim(run_dir, IDENTITY)
    assert json.loads((run_dir / claims.OWNER_FILE).read_text())["pid"] == os.getpid()
    claims.refuse_held(run_dir)  # this process holds the claim, so nothing is rejected
    for _ in range(2):
        claims.release(run_dir)
    assert not claims.is_locked(run_dir)


def test_a_run_whose_claim_was_taken_over_stops(tmp_path):
    claim_as(tmp_path / "a")
    claims.renew(tmp_path / "a")
    claim_as(tmp_path / "a", hostname="another-host", claimed_at=time.time() + 60)
    claims._claims[tmp_path / "a"] = claims._read(tmp_path / "a").model_copy(update={"pid": 1})
    with pytest.raises(RunError, match="on another-host has taken over the run"):
        claims.renew(tmp_path / "a")


@pytest.mark.parametrize(
    ("end", "kernel"), [("renewed", "another"), ("renewed", ""), ("released", ""), ("silent", "")]
)
def test_a_claim_without_locks_expires_unless_it_is_renewed(end, kernel, tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "RENEWAL_TIMEOUT_S", 30.0 if end == "renewed" else 1.0)
    claim_as(tmp_path / "a", hostname="another-host", kernel=kernel)
    os.close(claims._claim_fds.pop(tmp_path / "a"))
    claims._claims.clear()
    action = {"renewed": claims.renew, "released": claims.release, "silent": lambda _: None}[end]
    timer = threading.Timer(0.3, action, [tmp_path / "a"])
    timer.start()
    with refused("is still in use", "another-host") if end == "renewed" else nullcontext():
        claims.refuse_held(tmp_path / "a")
    timer.join()
    (tmp_path / "a" / claims.OWNER_FILE).write_text("{")
    claims.refuse_held(tmp_path / "a")


def test_the_claim_of_a_silent_machine_is_waited_for_once_with_a_note(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(claims, "RENEWAL_TIMEOUT_S", 1.0)
    run_dir = tmp_path / "a"
    claim_as(run_dir, hostname="\x1b[2Jother", kernel="")
    os.close(claims._claim_fds.pop(run_dir))
    claims._claims.clear()
    for _ in range(2):
        claims.refuse_held(run_dir)
    note = capsys.readouterr().err
    assert note.count("\n") == 1
    assert f"note: checking for 1 s whether '{run_dir}'" in note
    assert "on '\\x1b[2Jother' started" in note


def test_a_pipe_as_owner_file_does_not_block(tmp_path):
    os.mkfifo(tmp_path / claims.OWNER_FILE)
    claims.hold(tmp_path)
    claims.refuse_held(tmp_path)
    claims.refuse_duplicate_run(tmp_path.parent, IDENTITY)
    assert tmp_path not in claims._claims


def test_a_claimed_folder_that_is_removed_is_named(tmp_path):
    run_dir = tmp_path / "a"
    claim_as(run_dir)
    claims.renew(run_dir)
    (run_dir / claims.OWNER_FILE).unlink()
    with refused(f"{run_dir}/.owner.json was removed or renamed during the run"):
        claims.renew(run_dir)
    run_dir.rmdir()
    with refused(f"{run_dir} was removed or renamed during the run"):
        claims.renew(run_dir)
    assert not run_dir.exists()


def test_the_lock_file_of_another_user_works_and_a_held_lock_is_named(tmp_path, monkeypatch):
    (tmp_path / ".lock").touch()
    os_open = os.open

    def deny(path, flags, *mode):
        if flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied")
        return os_open(path, flags, *mode)

    monkeypatch.setattr(claims, "LOCK_TIMEOUT_S", 0.2)
    monkeypatch.setattr(os, "open", deny)
    with claims.lock_output_dir(tmp_path):
        pass
    with (
        claims.lock_output_dir(tmp_path),
        refused(f"kept {tmp_path / '.lock'} locked"),
        claims.lock_output_dir(tmp_path),
    ):
        pass
