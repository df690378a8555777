"""Keep a run alive if its output cannot be written."""

import contextlib
import io
import os
import sys
from typing import Any


class LastingStream:
    """Output stream whose reader may disappear (`| head -1`, a closed terminal). The run continues
    without its output, because it may still have to save."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, act: Any, *arguments: str) -> None:
        try:
            act(*arguments)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


def replace_unencodable() -> None:
    """Make the standard streams replace characters that they cannot encode, because an encoding
    error would end the run."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            # An input stream that has already been read cannot be reconfigured.
            with contextlib.suppress(io.UnsupportedOperation):
                stream.reconfigure(errors="replace")
