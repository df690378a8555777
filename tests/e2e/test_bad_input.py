"""Test errors that need several processes or another Python. tests/test_cli.py tests the others."""

import re
import sys

from tests.conftest import SMALL, assert_ok, run_command, train
from tests.e2e.support import assert_refused, run_folders
from tests.pool import ROOT, SCRIPT


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
