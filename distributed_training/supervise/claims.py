"""Claim a run's folder, so that only one run writes to it.

The processes of a run hold a shared lock on the folder's owner file, which names the run. Some file
systems have no locks, or show them only on one machine. There, the latest run owns the folder, and
an earlier run ends before it publishes a checkpoint. This module does not import torch."""

import contextlib
import fcntl
import json
import os
import platform
from pathlib import Path
from typing import Any

from distributed_training.records.record import OWNER_FILE
from distributed_training.settings.errors import RunError, UserError
from distributed_training.settings.files import shown

_OWNER_BYTES = 512  # each owner overwrites the whole file, so that nobody reads parts of two owners


def claim(run_dir: Path, run_id: str) -> None:
    """Claim a run's folder until this process ends. All attempts of one torchrun have the same
    `run_id`. Raises UserError if another run holds the folder."""
    descriptor = os.open(run_dir / OWNER_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        host = read_owner(run_dir).get("host")
        what = f"The run {shown(str(run_dir))} is still in use by {shown(host)}"
        fix = "wait for the run to end, or set resume=None to start a separate run"
        raise UserError(what, fix=fix) from None
    except OSError:  # the file system has no locks
        pass
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


def read_owner(run_dir: Path) -> dict[str, Any]:
    """Return the host and the run id of a folder's owner, or {} if the folder has no owner."""
    try:
        return dict(json.loads((run_dir / OWNER_FILE).read_bytes()))
    except (OSError, TypeError, ValueError):  # no owner yet
        return {}
