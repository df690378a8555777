"""What is printed where nobody reads any more."""

import os
import subprocess
import sys

import pytest

from distributed_training.settings import streams
from distributed_training.settings.streams import LastingStream
from tests.conftest import clean_environment
from tests.pool import ROOT


def test_a_reader_that_stalls_or_goes_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(streams, "STALLED_S", 0.2)
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream, os.fdopen(os.dup(writer), "w") as other:
        lasting = LastingStream(stream)
        lasting.write("first\n")
        lasting.write("x" * 100_000 + "\n")  # more than a pipe holds
        held = b""
        while len(held) < 60_000:
            held += os.read(reader, 2**20)
        assert held.startswith(b"first\nxxx")
        lasting.write("it reads again\n")
        assert os.read(reader, 2**20).endswith(b"it reads again\n")
        lasting.write("a line")  # as print does: then its end
        stream.write("of another process\n")
        stream.flush()
        lasting.write("\n")
        assert os.read(reader, 2**20) == b"of another process\na line\n"
        os.close(reader)
        for _ in range(2):
            lasting.write("nobody is there\n")
            lasting.flush()
        assert os.get_blocking(other.fileno()), "others share the old one"


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_go_nowhere(closed, tmp_path):
    """And no file that is opened later takes their place."""
    command = f'{sys.executable} real_model_example.py --dry-run --set output_dir="$0" {closed}'
    environment = clean_environment()
    done = subprocess.run(
        ["sh", "-c", command, tmp_path], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
