"""Test that the script responds to every user mistake with exit code 2 and one line that says what
is wrong, why, and what to type instead. The script must not create any files."""

import re
import sys

import pytest

from tests.conftest import SMALL, assert_ok, run_command, script, train
from tests.e2e.support import assert_refused, run_folders
from tests.pool import ROOT, SCRIPT

# Name -> (script arguments, words in the error). There is one case per kind of mistake. Unit tests
# check all other errors.
COMMAND_LINES = {
    "unknown key": ("--preset {tmp}/key.json", ["key.json", "'epoch'", "epochs"]),
    "output_dir is a file": (
        "--set output_dir={tmp}/file.txt", ["output_dir=", "file.txt"],
    ),
    "push to no name": (
        "--push a/b/c --dry-run", ["push='a/b/c'", "user/name"],
    ),
    "push of nothing": (
        "--push user/tiny --export false --dry-run", ["export=False"],
    ),
    "tokenizer": ("--set tokenizer={tmp}/none --dry-run", ["tokenizer=", "vocab.json"]),
}  # fmt: skip


@pytest.mark.parametrize("case", COMMAND_LINES)
def test_bad_command_lines_give_a_one_line_error(case, tmp_path):
    (tmp_path / "file.txt").touch()
    (tmp_path / "key.json").write_text('{"epoch": 2}')
    typed, words = COMMAND_LINES[case]
    arguments = typed.replace("{tmp}", str(tmp_path)).split()
    values = {**SMALL, "strategy": "zero2", "output_dir": tmp_path / "runs"}
    result = script(values, *arguments, HF_HOME=str(tmp_path / "hf"))
    assert_refused(result, *words)
    assert run_folders(tmp_path / "runs") == []


def test_damage_in_another_ranks_file_is_printed_once(tmp_path):
    """Only rank 0 reports the error, and all ranks exit."""
    values = {**SMALL, "strategy": "dp", "max_steps": 2, "output_dir": tmp_path / "runs"}
    assert_ok(train(values, num_processes=2))
    (run_dir,) = run_folders(tmp_path / "runs")
    file = run_dir / "checkpoints" / "step-00000002" / "rank-00001.safetensors"
    file.write_bytes(b"\0" * file.stat().st_size)
    result = train({**values, "resume": run_dir}, num_processes=2)
    assert result.returncode != 0
    (line,) = re.findall("^error: .*", result.stderr, re.MULTILINE)
    assert "rank-00001.safetensors" in line


def test_a_python_without_the_packages_is_named():
    result = run_command([sys.executable, "-S", SCRIPT, "plan"])
    fix = "activate" if (ROOT / ".venv").is_dir() else "-m pip install -r"
    assert_refused(result, sys.executable, fix)


def test_an_isolated_python_is_told_to_install_the_package():
    result = run_command([sys.executable, "-I", SCRIPT, "plan"])
    assert_refused(result, "distributed_training", "-e .")
