"""Lock a run directory with an owner file, which names the process that claimed the run.

All processes of the run on the same machine hold a shared lock on the file. The claim therefore
lasts until the last of these processes has ended. Other machines might not see the lock, and some
file systems do not support locks. Therefore, rank 0 of the run also touches the file every few
seconds. Rank 0 ends the run if another run has claimed the directory in the meantime. This module
does not import torch."""

import contextlib
import fcntl
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from distributed_training.settings.errors import RunError, UserError, print_stderr
from distributed_training.settings.files import open_regular, read_small, shown

OWNER_FILE = ".owner.json"
LOCK_TIMEOUT_S = 30.0  # longest wait for another process to create its run directory
RENEWAL_TIMEOUT_S = 20.0  # a live run renews its claim at least once within this time
_claim_fds: dict[Path, int] = {}  # run directory -> file descriptor of the open claim
_claims: dict[Path, "Claim"] = {}  # run directory -> latest claim that this process knows of
# run directory -> claim of another machine that was not renewed
_expired_claims: dict[Path, "Claim"] = {}


class Claim(BaseModel):
    """Contents of a run directory's owner file."""

    hostname: str
    pid: int
    claimed_at: float  # seconds since 1970
    kernel: str  # boot id of the machine that holds the lock; "" without a lock
    identity: dict[str, Any]  # from checkpoint/resume.py


@contextlib.contextmanager
def lock_output_dir(output_dir: Path) -> Iterator[None]:
    """Let only one process at a time create run directories in `output_dir`. The lock file `.lock`
    may belong to another user. Raises UserError if another process keeps the lock for
    LOCK_TIMEOUT_S seconds, or if the lock file cannot be opened."""
    file = output_dir / ".lock"
    try:
        lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:  # the file belongs to another user
        lock = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:  # for example, if .lock is a folder or a link to itself
        what = f"{file} cannot be opened"
        fix = "remove it, or set output_dir to another folder"
        raise UserError(what, str(error.strerror), fix) from None
    try:
        end = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    what = f"Another process has kept {file} locked for {LOCK_TIMEOUT_S:.0f} s"
                    fix = "end that process, or set output_dir to another folder"
                    raise UserError(what, fix=fix) from None
                time.sleep(0.05)
            except OSError:  # the file system has no locks
                break
        yield
    finally:
        os.close(lock)


def claim(run_dir: Path, identity: dict[str, Any]) -> None:
    """Claim a run directory. Raises UserError if another process holds the directory."""
    refuse_held(run_dir)
    if run_dir not in _claim_fds:
        _claim_fds[run_dir] = os.open(run_dir / OWNER_FILE, os.O_RDWR | os.O_CREAT)
    kernel = _boot_id()
    try:
        fcntl.flock(_claim_fds[run_dir], fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(_claim_fds[run_dir], fcntl.LOCK_SH)
    except OSError:  # the file system has no locks, or a lost machine still holds the lock
        kernel = ""
    new_claim = Claim(
        hostname=platform.node(), pid=os.getpid(), claimed_at=time.time(),
        kernel=kernel, identity=identity,
    )  # fmt: skip
    text = new_claim.model_dump_json().encode()
    os.pwrite(_claim_fds[run_dir], text, 0)
    os.truncate(_claim_fds[run_dir], len(text))
    _claims[run_dir] = new_claim


def hold(run_dir: Path) -> None:
    """Acquire a shared lock on the owner file if the run was claimed on this machine."""
    current = _read(run_dir)
    if current:
        _claims.setdefault(run_dir, current)
    if current and current.kernel == _boot_id() and run_dir not in _claim_fds:
        _claim_fds[run_dir] = os.open(run_dir / OWNER_FILE, os.O_RDONLY)
        fcntl.flock(_claim_fds[run_dir], fcntl.LOCK_SH)


def renew(run_dir: Path) -> None:
    """Signal to other machines that the run is alive. Raises RunError if another process has
    claimed the run or if the run directory was removed."""
    current = _read(run_dir)
    if run_dir in _claims and not os.path.lexists(run_dir / OWNER_FILE):
        raise build_removed_error(run_dir / OWNER_FILE if run_dir.is_dir() else run_dir)
    if current is not None and current != _claims.setdefault(run_dir, current):
        what = f"Process {current.pid} on {current.hostname} has taken over the run"
        raise RunError(what, f"this process sent no heartbeat for {RENEWAL_TIMEOUT_S:.0f} s")
    with contextlib.suppress(OSError):
        os.utime(run_dir / OWNER_FILE)


def build_removed_error(path: Path) -> RunError:
    """Return the error for a `path` that was removed during the run. `path` is a run directory or a
    file in a run directory."""
    what = f"{path} was removed or renamed during the run"
    why = "checkpoints and metrics can no longer be written there"
    return RunError(what, why, "start the run again")


def release(run_dir: Path) -> None:
    """Release the claim at the end of a run."""
    with contextlib.suppress(OSError):
        os.truncate(run_dir / OWNER_FILE, 0)
    if run_dir in _claim_fds:
        os.close(_claim_fds.pop(run_dir))


def refuse_held(run_dir: Path) -> None:
    """Raise UserError if another process holds the run directory."""
    current = _read(run_dir)
    is_local = current is None or current.kernel == _boot_id()
    if run_dir in _claim_fds or not (is_locked(run_dir) if is_local else _is_renewed(run_dir)):
        return
    what = f"The run {shown(str(run_dir))} is still in use"
    owner = f"process {current.pid} on {current.hostname} started it, and " if current else ""
    fix = "wait for the run to end, stop it, or set resume=None to start a separate run"
    raise UserError(what, f"{owner}its processes have not ended yet", fix)


def refuse_duplicate_run(output_dir: Path, identity: dict[str, Any]) -> None:
    """Raise UserError if a live run in `output_dir` has the given `identity`."""
    for file in output_dir.glob(f"*/{OWNER_FILE}"):
        current = _read(file.parent)
        is_link = file.parent.is_symlink()  # `latest` links to one of the other folders
        if not is_link and current is not None and current.identity == identity:
            refuse_held(file.parent)


def is_locked(run_dir: Path) -> bool:
    """Return whether a process on this machine holds a lock on the run directory."""
    try:
        with open(run_dir / OWNER_FILE, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # also if the file does not exist or cannot be locked
        return isinstance(error, BlockingIOError)
    return False


def _read(run_dir: Path) -> Claim | None:
    try:
        return Claim.model_validate_json(read_small(run_dir / OWNER_FILE))
    except (OSError, ValueError):
        return None


def _boot_id() -> str:
    """Return the boot id of this machine. All containers on the machine have the same boot id."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _is_renewed(run_dir: Path) -> bool:
    """Return whether another machine is still renewing its claim on the run directory. This
    function waits up to RENEWAL_TIMEOUT_S seconds. It returns False at once if an earlier call
    found that the same claim was not being renewed."""
    current = _read(run_dir)
    if current is None or _expired_claims.get(run_dir) == current:
        return False
    owner = f"which process {current.pid} on {shown(current.hostname)} started"
    text = (
        f"checking for {RENEWAL_TIMEOUT_S:.0f} s whether {shown(str(run_dir))}, {owner}, is still "
        "running"
    )
    print_stderr(f"note: {text}")
    last_renewed_at = None
    end = time.monotonic() + RENEWAL_TIMEOUT_S
    while time.monotonic() < end:
        # A network file system refreshes the modification time when a file is opened.
        with contextlib.suppress(OSError), open_regular(run_dir / OWNER_FILE) as file:
            renewed_at = os.fstat(file.fileno()).st_mtime_ns
            if last_renewed_at not in (None, renewed_at):
                return _read(run_dir) is not None  # an empty file means a released claim
            last_renewed_at = renewed_at
        time.sleep(0.5)
    _expired_claims[run_dir] = current
    return False
