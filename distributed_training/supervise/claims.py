"""Claim a run's folder, so that only one run writes to it.

The processes of a run hold a shared lock on the folder's owner file, which names the run. Some file
systems have no locks, or show them only on one machine. There, a run that has not released its
folder counts as alive while files in the folder change, and every run checks that it still owns its
folder before it publishes a checkpoint. This module does not import torch."""

import contextlib
import fcntl
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

from distributed_training.records.record import OWNER_FILE
from distributed_training.settings.errors import RunError, UserError
from distributed_training.settings.files import load_object, shown

QUIET_S = 60.0  # without a lock, a run has ended if its folder has not changed for this long
_OWNER_BYTES = 512  # each owner overwrites the whole file, so that nobody reads parts of two owners


def find_foreign_file(run_dir: Path) -> str:
    """Return why a run must not write to a folder, or "" if it may. Writing could change something
    outside if the folder belongs to another user or contains a link, a pipe or a device."""
    try:
        # Some network disks give this process's own files to another user id.
        with tempfile.TemporaryFile(dir=run_dir) as own_file:
            if os.fstat(own_file.fileno()).st_uid != run_dir.stat().st_uid:
                return f"{run_dir} belongs to another user"
    except OSError as error:
        return f"{run_dir} cannot be written: {error.strerror}"
    for path in run_dir.rglob("*"):
        is_foreign = path.is_symlink() or not (path.is_dir() or path.is_file())
        if is_foreign and path.relative_to(run_dir).parts[:-1][:1] != ("wandb",):
            return f"{path} is a link or a special file"
    return ""


def claim(run_dir: Path, run_id: str) -> None:
    """Claim a run's folder until this process ends. All attempts of one torchrun have the same
    `run_id`. Raises UserError if another run holds the folder, or if it has foreign files."""
    if reason := find_foreign_file(run_dir):
        fix = "remove the link, resume another run, or set resume=None to start a separate run"
        raise UserError(reason, fix=fix)
    descriptor = os.open(run_dir / OWNER_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    owner = read_owner(run_dir)
    changed_at = max(path.stat().st_mtime for path in run_dir.iterdir())
    is_alive = owner.get("run_id", run_id) != run_id and time.time() - changed_at < QUIET_S
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        is_alive = is_alive and owner.get("host") != platform.node()
    except OSError as error:  # BlockingIOError, or the file system has no locks
        is_alive = is_alive or isinstance(error, BlockingIOError)
    if is_alive:
        os.close(descriptor)
        what = f"The run {shown(str(run_dir))} is still in use by {shown(owner.get('host'))}"
        fix = f"wait for the run to end (if its machine is lost, {QUIET_S:.0f} s), or set "
        raise UserError(what, fix=f"{fix}resume=None to start a separate run")
    text = json.dumps({"host": platform.node(), "run_id": run_id})
    os.pwrite(descriptor, text.encode().ljust(_OWNER_BYTES), 0)
    os.fsync(descriptor)


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
