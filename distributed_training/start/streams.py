"""Keep a run alive if its output cannot be written."""

import io
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
    """Return a text stream that writes to the file of `stream`, line by line, and replaces
    characters that it cannot encode. A stream without a file is returned unchanged."""
    try:
        file = LastingFile(stream.fileno(), "w", closefd=False)
    except io.UnsupportedOperation:
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(file), stream.encoding, "replace", line_buffering=True
    )
