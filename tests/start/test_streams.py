"""Test output streams whose reader exits."""

import os
import shlex
import sys

from distributed_training.start.streams import open_lasting
from tests.conftest import SMALL, assert_ok, only_record, run_command, settings
from tests.pool import SCRIPT


def test_a_closed_reader_does_not_end_the_run():
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        lasting = open_lasting(stream)
        print("read", file=lasting, flush=True)
        assert os.read(reader, 100) == b"read\n"
        os.close(reader)
        for _ in range(2):
            print("nobody reads this", file=lasting, flush=True)


def test_closed_and_full_streams_do_not_end_a_run(tmp_path):
    values = {**SMALL, "strategy": "dp", "max_steps": 1, "export": False, "output_dir": tmp_path}
    options = settings(values)
    words = shlex.join(map(str, [sys.executable, SCRIPT, "--num_gpus", "2", *options]))
    assert run_command(["bash", "-c", f"{words} >&- 2>/dev/full <&-"]).returncode == 0
    assert only_record(tmp_path)["status"] == "ok"


def test_unencodable_characters_do_not_end_the_run():
    command = [sys.executable, SCRIPT, "--dry-run", "--generate", "größer \U0001f642"]
    command += ["--dataset", "embedded", "--model", "gpt2-tiny"]
    result = run_command(command, PYTHONIOENCODING="ascii")
    assert_ok(result)
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
    code = f"import sys; sys.argv = [{str(SCRIPT)!r}, '--seed', '1']\n{NOTEBOOK}"
    result = run_command([sys.executable, "-c", code])
    assert_ok(result)
    message, command = result.stdout.splitlines()
    assert (
        message == "error: Training cannot run in a notebook's kernel. Run this command in a cell:"
    )
    assert command == f"  !{sys.executable} {SCRIPT} --seed 1"
