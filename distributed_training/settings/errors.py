"""The one exception that is meant for users, how a process ends with it, and standard streams that
are there and hold nobody up."""

import contextlib
import os
import select
import signal
import stat
import sys
import threading
from collections.abc import Callable
from typing import Any

STALLED_S = 5.0  # after which a reader is not waited for, until it reads again


class UserError(ValueError):
    """A mistake the user can mend: what is wrong, why, and what to type instead. The command line
    prints it as one line and exits with code 2; it is never a traceback."""

    exit_code = 2

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        parts = [part.strip().rstrip(".") for part in (what, why, fix) if part]
        super().__init__("; ".join(" ".join(part.split()) for part in parts))


class RunError(UserError):
    """What ended a run that had begun, said in the same way; exit code 1."""

    exit_code = 1


def exit_code(act: Callable[[], int], *, trains: bool = True) -> int:
    """What `act` returns, or what goes with what it raises, which is said in a line."""
    try:
        code = act()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # | head: what is left to say has no reader
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except UserError as error:
        rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
        if rank == "0":  # every rank finds the same mistake; one says it
            print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        # Once training has begun, Ctrl-C saves.
        print("interrupted before training began" if trains else "interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


class LastingStream:
    """Output whose reader may go away (`| head -1`, a terminal that hangs up) or stall: what it
    does not take is dropped, and whoever writes goes on. Lines leave whole: `print` hands over the
    newline by itself, and other processes write to the same place."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._line = ""
        self._writing = threading.RLock()  # a signal's handler prints, too
        self._patience_s = STALLED_S
        self._file = -1
        with contextlib.suppress(OSError, ValueError):  # none that may stall, as in a test
            number = stream.fileno()
            if stat.S_ISFIFO(os.fstat(number).st_mode) or os.isatty(number):
                # Opened anew, for others share what is open. Libraries write there, too.
                opened = os.open(f"/proc/self/fd/{number}", os.O_WRONLY | os.O_NONBLOCK)
                os.dup2(opened, number)
                os.close(opened)
                self._file = number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._writing:
            self._line += text
            if "\n" in text or "\r" in text:  # a bar that ends moves the cursor back
                self._send()
        return len(text)

    def _send(self) -> None:
        text = self._line
        self._line = ""
        try:
            if self._file < 0:
                self._stream.write(text)
            else:
                self._write(text.encode(self._stream.encoding, "replace"))
            self._stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def _write(self, data: bytes) -> None:
        ready = select.poll()
        ready.register(self._file, select.POLLOUT)
        while data and ready.poll(1000 * self._patience_s):
            with contextlib.suppress(BlockingIOError):  # another process was quicker
                data = data[os.write(self._file, data) :]
        self._patience_s = 0.0 if data else STALLED_S

    def flush(self) -> None:
        with self._writing:
            self._send()


def fill_closed() -> None:
    """Streams that were closed, `>&-`, go nowhere; else the next file would take their place."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r"))
