"""Run the guide's commands as a student would type them in an 80-column terminal, with a text file
as data. The commands train, stop with Ctrl-C, continue, print the report and generate text. No
library may print a line."""

import io
import json
import re
import shlex
from pathlib import Path

import pexpect

from tests.conftest import ROOT, assert_ok, clean_environment, heavy_pool, only_record
from tests.e2e.support import clone, find_command, run_folders
from tests.support import small_text

GUIDE = "REAL_MODELS_GUIDE.md"
COLUMNS = 80
# Matches lines that torch, DeepSpeed, transformers or Python print.
LIBRARIES = re.compile(r"Warning|\[W\d|\[INFO\]|\[rank\d|\*\*\*|site-packages|Traceback|OMP_NUM")


def open_terminal(folder: Path, command: list[str]) -> pexpect.spawn:
    """Start a command in an 80-column terminal. `logfile_read` collects the command's output."""
    environment = clean_environment(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", PYTHONPATH="")
    terminal = pexpect.spawn(
        command[0], command[1:], cwd=folder, env=environment, dimensions=(24, COLUMNS),
        encoding="utf-8", timeout=400,
    )  # fmt: skip
    terminal.logfile_read = io.StringIO()
    return terminal


def end(terminal: pexpect.spawn) -> tuple[int, str]:
    """Wait for the command. Return its exit code and its whole output."""
    terminal.expect(pexpect.EOF)
    code = terminal.wait()
    terminal.close()  # after the wait, because closing sends SIGHUP to a running command
    return code, terminal.logfile_read.getvalue()


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
    code, text = end(open_terminal(folder, command))
    assert code == 0, text
    return text


def test_from_a_text_to_answers(tmp_path):
    """Train, stop with Ctrl-C, continue, report, and generate."""
    repository = clone(tmp_path / "repository")
    (repository / "notes.txt").write_text(small_text().read_text()[:8_000])
    first = find_command(GUIDE, "python real_model_example.py --dataset notes.txt")
    terminal = open_terminal(repository, first)
    terminal.expect(r" [1-9]\d*/\d+")
    before = len(terminal.logfile_read.getvalue())
    terminal.sendintr()
    code, text = end(terminal)
    assert code == 130
    assert_readable(text)
    # Ignore the terminal's echo, and lines about a step or an epoch that was in progress.
    said = [line for line in lines_of(text[before:]) if line.strip() not in ("", "^C")]
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

    proposed = said.replace("\r", "").partition("To use the model, run:")[2].split()
    assert proposed[2:4] == ["generate", f"runs/{run.name}"]

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
