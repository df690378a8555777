"""Who has a run's folder: a file in it says who began the run. No torch.

Processes of that machine keep it locked, all of them; so it is the run's until the last has ended.
For other machines, and where files cannot be locked, the run's rank 0 renews it every few seconds,
and ends the run where somebody has taken it over meanwhile."""

import contextlib
import fcntl
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from distributed_training.settings.errors import RunError, UserError
from distributed_training.settings.files import shown

OWNER_FILE = ".owner.json"
LOCKED_S = 30.0  # in which a process that gives itself a folder is done
RENEWED_S = 20.0  # a run that lives renews its claim at least once in this
_held: dict[Path, int] = {}  # run's folder -> the file, which this process has open
_seen: dict[Path, "Claim"] = {}  # run's folder -> whose this process knows it to be


class Claim(BaseModel):
    """What the file says."""

    hostname: str
    pid: int
    claimed_at: float  # seconds since 1970
    kernel: str  # that has the lock; "": none
    identity: dict[str, Any]  # resume.py's


@contextlib.contextmanager
def one_at_a_time(output_dir: Path) -> Iterator[None]:
    """Let one process at a time give out folders in `output_dir`, whoever owns its file `.lock`.
    Raises UserError if another keeps it for LOCKED_S."""
    file = output_dir / ".lock"
    try:
        opened = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:  # another user's
        opened = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:  # a folder, or a link to itself
        what = f"{file} cannot be opened"
        raise UserError(
            what, str(error.strerror), "remove it, or set output_dir elsewhere"
        ) from None
    try:
        end = time.monotonic() + LOCKED_S
        while True:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    what = f"another process has kept {file} locked for {LOCKED_S:.0f} s"
                    raise UserError(what, fix="end it, or set output_dir elsewhere") from None
                time.sleep(0.05)
            except OSError:  # files cannot be locked here
                break
        yield
    finally:
        os.close(opened)


def claim(run_dir: Path, identity: dict[str, Any]) -> None:
    """Take a run's folder for this process; raises UserError where another has it."""
    refuse_held(run_dir)
    if run_dir not in _held:
        _held[run_dir] = os.open(run_dir / OWNER_FILE, os.O_RDWR | os.O_CREAT)
    kernel = _kernel()
    try:
        fcntl.flock(_held[run_dir], fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(_held[run_dir], fcntl.LOCK_SH)
    except OSError:  # files cannot be locked here, or a machine that is gone has it locked
        kernel = ""
    mine = Claim(
        hostname=platform.node(), pid=os.getpid(), claimed_at=time.time(),
        kernel=kernel, identity=identity,
    )  # fmt: skip
    text = mine.model_dump_json().encode()
    os.pwrite(_held[run_dir], text, 0)
    os.truncate(_held[run_dir], len(text))
    _seen[run_dir] = mine


def hold(run_dir: Path) -> None:
    """This process is one of those whose run it is."""
    found = _read(run_dir)
    if found and found.kernel == _kernel() and run_dir not in _held:
        _held[run_dir] = os.open(run_dir / OWNER_FILE, os.O_RDONLY)
        fcntl.flock(_held[run_dir], fcntl.LOCK_SH)


def renew(run_dir: Path) -> None:
    """Tell other hosts that the run goes on; raises RunError where another has taken it over."""
    found = _read(run_dir)
    if found is not None and found != _seen.setdefault(run_dir, found):
        what = f"process {found.pid} on {found.hostname} has taken the run over"
        raise RunError(what, f"this one gave no sign of life for {RENEWED_S:.0f} s")
    with contextlib.suppress(OSError):
        os.utime(run_dir / OWNER_FILE)


def release(run_dir: Path) -> None:
    """The run has ended."""
    with contextlib.suppress(OSError):
        os.truncate(run_dir / OWNER_FILE, 0)
    if run_dir in _held:
        os.close(_held.pop(run_dir))


def refuse_held(run_dir: Path) -> None:
    """Raises UserError where another process has the run's folder."""
    found = _read(run_dir)
    here = found is None or found.kernel == _kernel()
    if run_dir in _held or not (is_locked(run_dir) if here else _is_renewed(run_dir)):
        return
    what = f"the run {shown(str(run_dir))} is going on"
    began = f"process {found.pid} on {found.hostname} began it, and " if found else ""
    fix = "wait for it or stop it; resume=None starts another beside it"
    raise UserError(what, f"{began}its processes have not ended yet", fix)


def refuse_doubling(output_dir: Path, identity: dict[str, Any]) -> None:
    """Raises UserError where a run in `output_dir` that is going on has that identity."""
    for file in output_dir.glob(f"*/{OWNER_FILE}"):
        found = _read(file.parent)
        latest = file.parent.is_symlink()
        if not latest and found is not None and found.identity == identity:
            refuse_held(file.parent)


def is_locked(run_dir: Path) -> bool:
    """Whether processes of this machine have the run's folder."""
    try:
        with open(run_dir / OWNER_FILE, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # or it is not there, or files cannot be locked here
        return isinstance(error, BlockingIOError)
    return False


def _read(run_dir: Path) -> Claim | None:
    try:
        return Claim.model_validate_json((run_dir / OWNER_FILE).read_bytes())
    except (OSError, ValueError):
        return None


def _kernel() -> str:
    """Of this boot of this machine: containers share it, whatever they call their host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _is_renewed(run_dir: Path) -> bool:
    before = None
    end = time.monotonic() + RENEWED_S
    while time.monotonic() < end:
        # On a network disk the time is asked for anew when a file is opened.
        with contextlib.suppress(OSError), open(run_dir / OWNER_FILE, "rb") as file:
            renewed_at = os.fstat(file.fileno()).st_mtime_ns
            if before not in (None, renewed_at):
                return _read(run_dir) is not None  # not where it was released
            before = renewed_at
        time.sleep(0.5)
    return False
