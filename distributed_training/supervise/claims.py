"""Claim a run's folder, so that only one run writes to it.

The processes of a run hold a shared lock on the folder's owner file, which names the run. Some file
systems have no locks, or show them only on one machine. There, a run that has not released its
folder counts as alive if files in the folder change while this process watches it, and every run
checks that it still owns its folder before it publishes a checkpoint. This module does not import
torch."""

import contextlib
import fcntl
import json
import os
import platform
import re
import stat
import time
from pathlib import Path
from typing import Any

from distributed_training.records.record import OWNER_FILE
from distributed_training.settings.errors import RunError, UserError, print_stderr
from distributed_training.settings.files import load_object, open_probe, shown

QUIET_S = 60.0  # without a lock, a run has ended if its folder does not change for this long
# Names in a run's folder that a run opens, fills or replaces
_WRITTEN = re.compile(
    r"(plan|record|\.owner)\.json|metrics\.jsonl|tensorboard|wandb|trace-rank.*"
    r"|hf|best|merged|checkpoints(/step-\d+)?|(checkpoints/)?\.(writing|replaced)-.*"
)
_OWNER_BYTES = 512  # each owner overwrites the whole file, so that nobody reads parts of two owners


def check_foreign_files(run_dir: Path) -> None:
    """Raise UserError if a run must not write to a folder. Writing could change something outside
    if the folder belongs to another user, or if a link, a pipe or a device has a name that a run
    writes to. Other links do not matter."""
    fix = "remove the link, or resume another run"
    # Some network disks give this process's own files to another user id.
    with open_probe(run_dir) as own_file:
        if os.fstat(own_file.fileno()).st_uid != run_dir.stat().st_uid:
            raise UserError(f"{run_dir} belongs to another user", fix=fix)
    for parent, folders, files in os.walk(run_dir):
        for path in (Path(parent, name) for name in (*folders, *files)):
            with contextlib.suppress(FileNotFoundError):  # The run may be alive.
                mode = path.lstat().st_mode
                is_foreign = not (stat.S_ISDIR(mode) or stat.S_ISREG(mode))
                if is_foreign and _WRITTEN.fullmatch(path.relative_to(run_dir).as_posix()):
                    raise UserError(f"{path} is a link or a special file", fix=fix)


class InUseError(UserError):
    """Raised if another run holds a folder."""


def claim(run_dir: Path, run_id: str) -> int:
    """Claim a run's folder until this process ends, or closes the descriptor that is returned. All
    attempts of one torchrun have the same `run_id`. Raises InUseError if another run holds the
    folder, and UserError if it has foreign files."""
    check_foreign_files(run_dir)
    descriptor = os.open(run_dir / OWNER_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    owner = read_owner(run_dir)
    is_locked = False
    may_be_alive = owner.get("run_id", run_id) != run_id  # another run, which has not released it
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        may_be_alive = may_be_alive and owner.get("host") != platform.node()
    except OSError as error:  # BlockingIOError, or the file system has no locks
        is_locked = isinstance(error, BlockingIOError)
    if is_locked or (may_be_alive and _is_changing(run_dir, owner)):
        os.close(descriptor)
        what = f"The run {shown(str(run_dir))} is still in use by {shown(owner.get('host'))}"
        fix = "wait for the run to end, or set resume=None to start a separate run"
        raise InUseError(what, fix=fix)
    text = json.dumps({"host": platform.node(), "run_id": run_id})
    os.pwrite(descriptor, text.encode().ljust(_OWNER_BYTES), 0)
    os.fsync(descriptor)
    return descriptor


def wait_until_free(run_dir: Path, run_id: str) -> None:
    """Wait until no other run holds a folder. The caller must then claim it."""
    host = shown(read_owner(run_dir).get("host"))
    print_stderr(f"note: waiting until the run {shown(str(run_dir))} on {host} ends")
    while True:
        try:
            return os.close(claim(run_dir, run_id))
        except InUseError:
            time.sleep(QUIET_S)


def _is_changing(run_dir: Path, owner: dict[str, Any]) -> bool:
    """Watch a run's folder and return whether a file in it changes. Times of files are not compared
    with this machine's clock, which may differ from the clock that set them."""
    print_stderr(
        f"note: waiting {QUIET_S:.0f} s to see whether the run in {shown(str(run_dir))} "
        f"still writes there, because {shown(owner.get('host'))} has not released it"
    )

    times = set()
    with contextlib.suppress(FileNotFoundError):  # a file was removed meanwhile
        for seconds in (QUIET_S, 0):
            times.add(tuple(path.lstat().st_mtime_ns for path in sorted(run_dir.rglob("*"))))
            time.sleep(seconds)
        return len(times) > 1
    return True


def hold(run_dir: Path) -> None:
    """Hold the claim in this process too, until the process ends."""
    with contextlib.suppress(OSError):  # another node's folder, or a file system without locks
        fcntl.flock(os.open(run_dir / OWNER_FILE, os.O_RDONLY), fcntl.LOCK_SH)


def check(run_dir: Path, run_id: str) -> None:
    """Raise RunError if the folder was removed, or if another run has claimed it."""
    if read_owner(run_dir).get("run_id", "") != run_id:
        raise build_removed_error(run_dir)


def build_removed_error(run_dir: Path) -> RunError:
    """Return the error for a run folder that was removed or claimed by another run."""
    what = f"{run_dir} was removed or renamed, or another run has claimed it"
    why = "checkpoints and metrics can no longer be written there"
    return RunError(what, why, "start the run again")


def release(run_dir: Path) -> None:
    """Allow other machines to resume the run, although this process has not ended yet."""
    with contextlib.suppress(OSError):
        os.truncate(run_dir / OWNER_FILE, 0)


def read_owner(run_dir: Path) -> dict[str, Any]:
    """Return the host and the run id of a folder's owner, or {} if the folder has no owner."""
    try:
        return load_object(run_dir / OWNER_FILE, "owner")
    except UserError:  # the previous run has released the folder
        return {}
