"""Test output streams whose reader exits."""

import os
import subprocess
import sys

from distributed_training.start.streams import open_lasting
from tests.conftest import clean_environment
from tests.pool import ROOT


def test_a_closed_reader_does_not_end_the_run():
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        lasting = open_lasting(stream)
        print("read", file=lasting, flush=True)
        assert os.read(reader, 100) == b"read\n"
        os.close(reader)
        for _ in range(2):
            print("nobody reads this", file=lasting, flush=True)


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
