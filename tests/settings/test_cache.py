"""Test the caches that later runs on the same machine use."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from distributed_training.settings.cache import CACHE_VARIABLE
from distributed_training.settings.files import ROOT


def refused_or_variables(**environment):
    """Set up private caches in a process with the given environment variables. Return its output:
    notes and the resulting environment as JSON, or the error."""
    code = "import json, os; from distributed_training.settings.cache import *\n"
    code += "try: use_private_caches()\nexcept ValueError as error: print(error)\n"
    code += "else: print(json.dumps(dict(os.environ)))"
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TMPDIR")
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    environment = {
        "PYTHONPATH": str(ROOT),
        **{name: str(value) for name, value in environment.items()},
    }
    command = [sys.executable, "-c", code]
    answer = subprocess.run(
        command, env={**inherited, **environment}, capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stderr
    return (answer.stderr + answer.stdout).strip()


CODE_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR")


def test_code_that_torch_compiles_is_stored_where_no_other_user_can_write(tmp_path):
    variables = json.loads(refused_or_variables(**{CACHE_VARIABLE: tmp_path / "own"}))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR"):
        folder = Path(variables[name])
        assert folder.is_relative_to(tmp_path / "own")
        assert {path.stat().st_mode & 0o777 for path in (folder, tmp_path / "own")} == {0o700}


@pytest.mark.parametrize("name", [*CODE_CACHES, CACHE_VARIABLE])
def test_a_cache_folder_that_cannot_be_created_is_refused(name, tmp_path):
    error_text = refused_or_variables(**{CACHE_VARIABLE: tmp_path, name: "/dev/null/cache"})
    assert "/dev/null/cache" in error_text
    assert name in error_text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("name", [*CODE_CACHES, CACHE_VARIABLE])
def test_code_caches_of_another_user_are_refused(name, tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir()
    os.chown(folder, 12345, -1)
    error_text = refused_or_variables(**{CACHE_VARIABLE: tmp_path / "own", name: folder})
    assert "12345" in error_text
    assert name in error_text
