"""Test the caches that later runs on the same machine use."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distributed_training.settings.cache import CACHE_VARIABLE
from distributed_training.settings.files import ROOT

TORCH = """
import os
from distributed_training.start.bytecode import keep_bytecode
os.cpu_count = lambda: {}
keep_bytecode()
import torch
"""


def start(tmp_path, dont_write, num_cores=2):
    """Start a process that imports a package named torch. Return the bytecode files that exist for
    this package when the process has ended."""
    package = tmp_path / "site" / "torch" / "__init__.py"
    package.parent.mkdir(parents=True, exist_ok=True)
    package.touch()
    (package.parent / "more.py").touch()
    paths = [str(package.parents[1]), str(ROOT)]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": dont_write,
        "DISTRIBUTED_TRAINING_CACHE": str(tmp_path / "cache"),
    }  # fmt: skip
    environment.pop("PYTHONPYCACHEPREFIX", None)
    subprocess.run([sys.executable, "-c", TORCH.format(num_cores)], env=environment, check=True)
    return [path.relative_to(tmp_path) for path in tmp_path.rglob("*.pyc") if "torch" in path.parts]


@pytest.mark.parametrize(("dont_write", "place"), [("1", "cache/bytecode"), ("", "site/torch")])
def test_bytecode_is_cached_by_python_or_in_our_cache(dont_write, place, tmp_path):
    bytecode_files = start(tmp_path, dont_write)
    assert [str(path).startswith(place) for path in bytecode_files] == [True]
    assert start(tmp_path, "1") == bytecode_files, "once"


def test_other_modules_are_cached_even_if_torch_is_already_compiled(tmp_path):
    start(tmp_path, "")
    (tmp_path / "site" / "torch" / "__init__.py").write_text("import torch.more")
    assert {path.stem.partition(".")[0] for path in start(tmp_path, "1")} == {"__init__", "more"}


def test_many_cores_compile_modules_before_they_are_imported(tmp_path):
    start(tmp_path, "1", num_cores=16)
    end = time.monotonic() + 60
    while not list((tmp_path / "cache").rglob("more.*.pyc")):
        assert time.monotonic() < end
        time.sleep(0.1)


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
@pytest.mark.parametrize("is_link", [False, True])
def test_code_caches_of_another_user_are_refused(is_link, name, tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    path = tmp_path / "link" if is_link else folder
    os.chown(folder, 12345, -1)
    error_text = refused_or_variables(**{CACHE_VARIABLE: tmp_path / "own", name: path})
    assert "12345" in error_text
    assert name in error_text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_in_the_cache_is_refused(tmp_path):
    (tmp_path / "inductor").mkdir()
    os.chown(tmp_path / "inductor", 12345, -1)
    assert "12345" in refused_or_variables(**{CACHE_VARIABLE: tmp_path})
