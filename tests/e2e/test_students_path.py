"""Run the guide's commands as a student would type them in an 80-column terminal, with a text file
as data. The commands train, stop with Ctrl-C, continue, print the report and generate text. No
library may print a line."""

import fcntl
import json
import os
import pty
import re
import select
import shlex
import struct
import subprocess
import termios
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, assert_ok, clean_environment, heavy_pool, only_record
from tests.e2e.support import clone, find_command, run_folders
from tests.support import small_text

GUIDE = "REAL_MODELS_GUIDE.md"
COLUMNS = 80
# Matches lines that torch, DeepSpeed, transformers or Python print.
LIBRARIES = re.compile(r"Warning|\[W\d|\[INFO\]|\[rank\d|\*\*\*|site-packages|Traceback|OMP_NUM")


class Terminal:
    """A command that runs in an 80-column terminal. `text` is the command's output so far."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        keyboard, screen = pty.openpty()
        fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), screen)
        controlling = lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # noqa: E731
        environment = clean_environment(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", PYTHONPATH="")
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, preexec_fn=controlling, start_new_session=True,
            **streams,
        )  # fmt: skip
        os.close(screen)
        self.keyboard, self.text = keyboard, ""

    def read_until(self, pattern: str, limit_s: float = 120) -> None:
        """Wait until the output matches `pattern`. If `pattern` is empty, wait until the output
        ends."""
        end = time.monotonic() + limit_s
        while not (pattern and re.search(pattern, self.text)):
            ready, _, _ = select.select([self.keyboard], [], [], max(0, end - time.monotonic()))
            if not ready:
                self.process.kill()
                pytest.fail(f"{pattern!r} not shown within {limit_s} s:\n{self.text}")
            try:
                self.text += os.read(self.keyboard, 65536).decode()
            except OSError:  # the process has closed the terminal
                return

    def end(self) -> int:
        """Read the remaining output and return the exit code."""
        self.read_until("", limit_s=400)
        os.close(self.keyboard)
        return self.process.wait(timeout=60)


def lines_of(text: str) -> list[str]:
    """Return the final state of each line, because progress bars overwrite their lines."""
    return [line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n")]


def assert_readable(text: str) -> None:
    for line in lines_of(text):
        line = line.removesuffix("^C")  # the terminal's echo
        is_command = line.startswith("  python ")  # not wrapped, so that it can be copied
        assert is_command or len(line) <= COLUMNS, f"{len(line)} columns: {line}"
        assert not LIBRARIES.search(line), line


def type_in(folder: Path, command: list[str]) -> str:
    """Run a command, check that it succeeds, and return its output."""
    terminal = Terminal(folder, command)
    code = terminal.end()
    assert code == 0, terminal.text
    return terminal.text


def test_from_a_text_to_answers(tmp_path):
    """Train, stop with Ctrl-C, continue, report, and generate."""
    repository = clone(tmp_path / "repository")
    (repository / "notes.txt").write_text(small_text().read_text()[:8_000])
    first = find_command(GUIDE, "python real_model_example.py --dataset notes.txt")
    terminal = Terminal(repository, first)
    terminal.read_until(r" [1-9]\d*/\d+")
    before = len(terminal.text)
    os.write(terminal.keyboard, b"\x03")
    assert terminal.end() == 130
    assert_readable(terminal.text)
    # Ignore the terminal's echo, and lines about a step or an epoch that was in progress.
    said = [line for line in lines_of(terminal.text[before:]) if line.strip() not in ("", "^C")]
    after = [line for line in said if "epoch" not in line and "perplexity" not in line]
    assert len(after) <= 5, after
    assert any("saved" in line for line in after)
    lines = iter(after)
    next(line for line in lines if line.endswith("To continue, run:"))
    continuing = shlex.split(" ".join(line.removesuffix("\\") for line in lines))
    (run,) = run_folders(repository / "runs")
    stopped = json.loads((run / "record.json").read_text())
    assert 0 < stopped["step"] < stopped["num_steps"]

    said = type_in(repository, continuing)
    assert_readable(said)
    assert f"checkpoints/step-{stopped['step']:08}" in said  # the step that it resumed from
    record = only_record(repository / "runs")
    assert record["status"] == "ok"
    losses = [row["loss"] for row in record["evaluations"]]
    assert losses[-1] < losses[0] - 0.7, "the perplexity was halved"

    proposed = said.replace("\r", "").partition("Next, for example:")[2].splitlines()
    assert [line.split()[2] for line in proposed if "python" in line][:2] == ["generate", "report"]

    report = type_in(repository, find_command(GUIDE, "python real_model_example.py report"))
    assert_readable(report)
    assert f"{losses[-1]:.4f}" in report
    asks = find_command(GUIDE, "python real_model_example.py generate")
    answer = type_in(repository, [*asks, "--temperature", "0"])
    assert answer.startswith(asks[-1])
    assert len(answer.split()) > 5

    (repository / "notes.txt").rename(repository / "other.txt")
    pages = "".join((ROOT / page).read_text() for page in ("README.md", GUIDE))
    on_a_run = r"^ *(python \S+\.py (?:eval|generate|--model runs/<run>/hf|export)[^#\n]*)"
    for command in re.findall(on_a_run, pages, re.MULTILINE):
        words = shlex.split(command.replace("<run>", run.name))
        words += ["--dry-run"] if "--model" in words else []
        assert_ok(heavy_pool().script(words[2:], script=repository / words[1], cwd=repository))
