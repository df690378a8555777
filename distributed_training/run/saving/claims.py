"""Who has a run's folder: a file in it names the process that planned the run. No torch.

A claim holds as long as that process lives. On another host, where it cannot be asked, the run's
rank 0 renews the file every few seconds.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from distributed_training.records.record import process_lives, write_json
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import shown

OWNER_FILE = ".owner.json"
RENEWED_S = 20.0  # a run that lives renews its claim at least once in this


class Claim(BaseModel):
    """What the file says."""

    hostname: str
    pid: int
    claimed_at: float  # seconds since 1970
    identity: dict[str, Any]  # resume.py's


def claim(run_dir: Path, identity: Mapping[str, Any]) -> None:
    """Take a run's folder for this process; raises UserError where another has it."""
    refuse_held(run_dir)
    who = {"hostname": platform.node(), "pid": os.getpid(), "claimed_at": time.time()}
    write_json(run_dir / OWNER_FILE, who | {"identity": identity})


def renew(run_dir: Path) -> None:
    """Tell other hosts that the run goes on."""
    with contextlib.suppress(OSError):
        os.utime(run_dir / OWNER_FILE)


def release(run_dir: Path) -> None:
    """The run has ended."""
    (run_dir / OWNER_FILE).unlink(missing_ok=True)


def refuse_held(run_dir: Path) -> None:
    """Raises UserError where another process has the run's folder."""
    found = _read(run_dir)
    if found is not None and _holds(run_dir, found):
        raise going_on(run_dir, found.pid, found.hostname)


def going_on(run_dir: Path, pid: int | None, hostname: str | None) -> UserError:
    """The error for whoever would join that run."""
    what = f"the run {shown(str(run_dir))} is going on"
    fix = "wait for it or stop it; resume=None starts another beside it"
    return UserError(what, f"process {pid} on {hostname} has it", fix)


def refuse_doubling(output_dir: Path, identity: Mapping[str, Any]) -> None:
    """Raises UserError where a run with that identity is going on in `output_dir`."""
    for file in sorted(output_dir.glob(f"*/{OWNER_FILE}")):
        found = None if file.parent.is_symlink() else _read(file.parent)  # latest
        if found is not None and found.identity == identity:
            refuse_held(file.parent)


def _read(run_dir: Path) -> Claim | None:
    try:
        return Claim.model_validate_json((run_dir / OWNER_FILE).read_bytes())
    except (OSError, ValueError):
        return None


def _holds(run_dir: Path, found: Claim) -> bool:
    if found.hostname == platform.node():
        return found.pid != os.getpid() and process_lives(found.pid, found.claimed_at)
    before = _renewed_at(run_dir)
    end = time.monotonic() + RENEWED_S
    while time.monotonic() < end:
        time.sleep(0.5)
        if _renewed_at(run_dir) != before:
            return _read(run_dir) is not None  # not where it was released
    return False


def _renewed_at(run_dir: Path) -> int:
    """On a network disk the time is asked for anew when a file is opened."""
    with contextlib.suppress(OSError), open(run_dir / OWNER_FILE, "rb") as file:
        return os.fstat(file.fileno()).st_mtime_ns
    return 0
