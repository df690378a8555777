"""Keep standard streams open, and prevent writes to them from blocking."""

import contextlib
import io
import os
import select
import stat
import sys
import threading
from typing import Any

# Time to wait for a stalled reader. Until the reader reads again, later writes do not wait.
STALL_TIMEOUT_S = 5.0


class NonBlockingStream:
    """Output stream whose reader may disappear (`| head -1`, a closed terminal) or stall.

    Text that the reader does not accept is dropped, and the writer continues. Whole lines are
    written at once, because `print` writes the newline separately and other processes write to the
    same stream."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._line = ""
        self._lock = threading.RLock()  # reentrant, because signal handlers also print
        self._timeout_s = STALL_TIMEOUT_S
        self._fd = -1
        # A stream without a file descriptor, for example in a test, cannot stall.
        with contextlib.suppress(OSError, ValueError):
            fd = stream.fileno()
            if stat.S_ISFIFO(os.fstat(fd).st_mode) or os.isatty(fd):
                # The file is opened again, because O_NONBLOCK would otherwise affect other
                # processes that share the open file description. dup2 keeps the descriptor, to
                # which libraries also write.
                nonblocking_fd = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK)
                os.dup2(nonblocking_fd, fd)
                os.close(nonblocking_fd)
                self._fd = fd

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._lock:
            self._line += text
            if "\n" in text or "\r" in text:  # "\r" is from a progress bar
                self._send()
        return len(text)

    def _send(self) -> None:
        text = self._line
        self._line = ""
        try:
            if self._fd < 0:
                self._stream.write(text)
            else:
                self._write(text.encode(self._stream.encoding, "replace"))
            self._stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def _write(self, data: bytes) -> None:
        poller = select.poll()
        poller.register(self._fd, select.POLLOUT)
        while data and poller.poll(1000 * self._timeout_s):
            with contextlib.suppress(BlockingIOError):  # another process has filled the pipe
                data = data[os.write(self._fd, data) :]
        self._timeout_s = 0.0 if data else STALL_TIMEOUT_S

    def flush(self) -> None:
        with self._lock:
            self._send()


def replace_unencodable() -> None:
    """Make the standard streams replace characters that they cannot encode, because an encoding
    error would end the run."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            # An input stream that has already been read cannot be reconfigured.
            with contextlib.suppress(io.UnsupportedOperation):
                stream.reconfigure(errors="replace")


def open_closed_streams() -> None:
    """Open /dev/null for standard streams that are closed (`>&-`). Otherwise, the next opened file
    would get the descriptor of a closed stream."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r"))
