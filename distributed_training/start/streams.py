"""Standard streams that are there and hold nobody up."""

import contextlib
import io
import os
import select
import stat
import sys
import threading
from typing import Any

STALLED_S = 5.0  # after which a reader is not waited for, until it reads again


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


def replace_unwritable() -> None:
    """Write another character for each that a stream's encoding lacks: none ends a run."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            with contextlib.suppress(io.UnsupportedOperation):  # an input that has been read from
                stream.reconfigure(errors="replace")


def fill_closed() -> None:
    """Streams that were closed, `>&-`, go nowhere; else the next file would take their place."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r"))
