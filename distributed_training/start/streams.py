"""Keep a run alive if its output cannot be written."""

import contextlib
import io
import os
import sys
from typing import Any


class LastingFile(io.FileIO):
    """Output file whose reader may disappear (`| head -1`, a closed terminal). The run continues
    without its output, because it may still have to save."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def open_lasting(stream: Any) -> Any:
    """Return a text stream that writes to the file of `stream`, line by line. A stream without a
    file is returned unchanged."""
    try:
        file = LastingFile(stream.fileno(), "w", closefd=False)
    except io.UnsupportedOperation:
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(file), stream.encoding, stream.errors, line_buffering=True
    )


def open_closed_streams() -> None:
    """Connect the standard streams that are closed, for example by `>&-`, to /dev/null. Otherwise,
    files that are opened later would get their descriptors, and Python sets the streams to None."""
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


def replace_unencodable() -> None:
    """Make the standard streams replace characters that they cannot encode, because an encoding
    error would end the run."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # An input stream that has already been read cannot be reconfigured.
            with contextlib.suppress(io.UnsupportedOperation):
                stream.reconfigure(errors="replace")
