"""Test the claim on a run's folder."""

import errno
import fcntl
import os
import subprocess
import sys
import time

import pytest

from distributed_training.records.folder import CHECKPOINTS, stamp_unfinished
from distributed_training.settings.errors import RunError, UserError
from distributed_training.supervise import claims
from tests.conftest import clean_environment
from tests.support import edit_json, refused

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
def test_a_run_of_another_machine_is_refused_unless_it_has_ended(has_locks, tmp_path, monkeypatch):
    """The lock of another machine may be invisible. Its run is then alive if it has not released
    its folder and files change in the folder, whatever their times are, unless it is an earlier
    attempt of this run."""

    def flock(descriptor, operation):
        if not has_locks:
            raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    metrics = tmp_path / "metrics.jsonl"

    claims.claim(tmp_path, "first")
    edit_json(tmp_path / claims.OWNER_FILE, host="another-host")
    metrics.touch()
    for clock in (time.time() + 86400, 1):
        with monkeypatch.context() as patch:
            patch.setattr(time, "sleep", lambda _, at=clock: os.utime(metrics, (at, at)))
            with refused(str(tmp_path), "'another-host'", "resume=None"):
                claims.claim(tmp_path, "second")
    claims.claim(tmp_path, "first")  # restarted on this machine
    edit_json(tmp_path / claims.OWNER_FILE, host="another-host")
    monkeypatch.setattr(claims, "QUIET_S", 0.1)
    os.utime(metrics, (time.time() + 86400,) * 2)
    claims.claim(tmp_path, "second")
    with pytest.raises(RunError):
        claims.check(tmp_path, "first")
    edit_json(tmp_path / claims.OWNER_FILE, host="another-host")
    claims.release(tmp_path)
    claims.claim(tmp_path, "third")


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b'{"host": 1}'])
def test_a_damaged_owner_file_does_not_prevent_a_claim(content, tmp_path):
    (tmp_path / claims.OWNER_FILE).write_bytes(content)
    claims.claim(tmp_path, "first")
    assert claims.read_owner(tmp_path)["run_id"] == "first"


@pytest.mark.parametrize("kind", ["link", "broken link", "pipe"])
@pytest.mark.parametrize(
    "name",
    [
        ".owner.json", ".writing-hf", ".replaced-best", "checkpoints", "metrics.jsonl",
        "record.json", "plan.json", "hf", "best", "checkpoints/.writing-00000001",
        "checkpoints/step-00000001", "tensorboard", "wandb",
    ],
)  # fmt: skip
def test_a_folder_with_a_link_or_a_pipe_is_refused_and_nothing_outside_changes(
    name, kind, tmp_path
):
    run_dir, outside = tmp_path / "run", tmp_path / "outside"
    (run_dir / name).parent.mkdir(parents=True)
    if kind == "pipe":
        os.mkfifo(run_dir / name)
    else:
        (run_dir / name).symlink_to(outside)
    if kind == "link":
        outside.write_text("kept")
    with refused(str(run_dir / name)):
        claims.claim(run_dir, "first")
    assert not outside.exists() if kind != "link" else outside.read_text() == "kept"


@pytest.mark.parametrize("name", ["wandb/latest-run", "my_notes", "hf/notes", "checkpoints/good"])
def test_links_that_nothing_writes_through_are_not_refused(name, tmp_path):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).symlink_to("text.txt")
    claims.claim(tmp_path, "first")
    assert claims.read_owner(tmp_path)["run_id"] == "first"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_refused(tmp_path):
    os.chown(tmp_path, 12345, 12345)
    with refused(str(tmp_path)):
        claims.claim(tmp_path, "first")


def test_a_removed_folder_is_named(tmp_path):
    claims.check(tmp_path, "")  # a run that was never claimed
    with pytest.raises(RunError, match=str(tmp_path)):
        claims.check(tmp_path / "removed", "first")


@pytest.mark.parametrize("look", [stamp_unfinished, claims.check_foreign_files])
def test_folders_may_be_published_while_others_look(look, tmp_path, monkeypatch):
    """A rank that waits for the disk, or a launch that waits for a run, lists the run's files."""
    writing = tmp_path / CHECKPOINTS / ".writing-step-00000005"
    writing.mkdir(parents=True)
    scandir = os.scandir

    def publish_first(path="."):
        if str(path).endswith(writing.name) and writing.exists():
            writing.rename(tmp_path / CHECKPOINTS / "step-00000005")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", publish_first)
    look(tmp_path)
    assert not writing.exists()
