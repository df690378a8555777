"""Test output streams whose reader stalls or exits."""

import os
import subprocess
import sys

import pytest

from distributed_training.start import streams
from distributed_training.start.streams import NonBlockingStream
from tests.conftest import clean_environment
from tests.pool import ROOT


def test_a_stalled_or_closed_reader_does_not_block_the_run(monkeypatch):
    monkeypatch.setattr(streams, "STALL_TIMEOUT_S", 0.2)
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream, os.fdopen(os.dup(writer), "w") as other:
        lasting = NonBlockingStream(stream)
        lasting.write("first\n")
        lasting.write("x" * 100_000 + "\n")  # more than a pipe can hold
        received = b""
        while len(received) < 60_000:
            received += os.read(reader, 2**20)
        assert received.startswith(b"first\nxxx")
        lasting.write("it reads again\n")
        assert os.read(reader, 2**20).endswith(b"it reads again\n")
        lasting.write("a line")  # like print, which writes the newline separately
        stream.write("of another process\n")
        stream.flush()
        lasting.write("\n")
        assert os.read(reader, 2**20) == b"of another process\na line\n"
        os.close(reader)
        for _ in range(2):
            lasting.write("nobody reads this\n")
            lasting.flush()
        assert os.get_blocking(other.fileno()), "others share the old one"


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_output_to_closed_streams_is_discarded(closed, tmp_path):
    """A file that is opened later must not get the descriptor of a closed stream."""
    command = f'{sys.executable} real_model_example.py --dry-run --set output_dir="$0" {closed}'
    environment = clean_environment()
    result = subprocess.run(
        ["sh", "-c", command, tmp_path], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr


def test_unencodable_characters_do_not_end_the_run():
    command = [sys.executable, ROOT / "real_model_example.py", "--dry-run"]
    options = [
        "--generate",
        "größer \U0001f642",
        "--dataset",
        "embedded-prose",
        "--model",
        "gpt2-tiny",
    ]
    environment = clean_environment(PYTHONIOENCODING="ascii")
    result = subprocess.run([*command, *options], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "'gr??er ?'" in result.stdout


NOTEBOOK = """
import runpy, signal, sys, types
shell = types.SimpleNamespace(kernel=object())
sys.modules["IPython"] = types.SimpleNamespace(get_ipython=lambda: shell)
before = signal.getsignal(signal.SIGCHLD), sys.stdout, dict(__import__("os").environ)
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    assert end.code == 2
assert before == (signal.getsignal(signal.SIGCHLD), sys.stdout, dict(__import__("os").environ))
assert not [name for name in sys.modules if name.startswith("distributed_training")]
"""


def test_a_notebook_kernel_stays_unchanged():
    script = str(ROOT / "real_model_example.py")
    code = f"import sys; sys.argv = [{script!r}, '--seed', '1']\n{NOTEBOOK}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    message, command = result.stdout.splitlines()
    assert (
        message == "error: Training cannot run in a notebook's kernel. Run this command in a cell:"
    )
    assert command == f"  !{sys.executable} {script} --seed 1"
