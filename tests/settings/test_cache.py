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


def test_code_that_torch_compiles_is_stored_where_no_other_user_can_write(tmp_path):
    variables = json.loads(refused_or_variables(DISTRIBUTED_TRAINING_CACHE=tmp_path / "own"))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR"):
        folder = Path(variables[name])
        assert folder.is_relative_to(tmp_path / "own")
        assert {path.stat().st_mode & 0o777 for path in (folder, tmp_path / "own")} == {0o700}
    # If the cache folder cannot be used, a per-user folder in the temporary folder replaces it.
    variables = json.loads(
        refused_or_variables(DISTRIBUTED_TRAINING_CACHE=os.devnull, TMPDIR=tmp_path)
    )
    folder = tmp_path / f"distributed-training-{os.geteuid()}" / "inductor"
    assert variables["TORCHINDUCTOR_CACHE_DIR"] == str(folder)


def test_an_unusable_cache_folder_is_refused_and_a_fallback_to_tmp_gives_a_note(tmp_path):
    error_text = refused_or_variables(**{CACHE_VARIABLE: "/dev/null/cache", "TMPDIR": tmp_path})
    assert error_text == (
        "/dev/null/cache is not a safe place for code that this user runs. "
        "It cannot be created: Not a directory. "
        f"Set {CACHE_VARIABLE} to a folder of your own."
    )
    error_text = refused_or_variables(
        TORCHINDUCTOR_CACHE_DIR="/dev/null/cache", **{CACHE_VARIABLE: tmp_path}
    )
    assert (
        "It cannot be created: Not a directory. Set TORCHINDUCTOR_CACHE_DIR to a folder"
        in error_text
    )
    error_text = refused_or_variables(TRITON_CACHE_DIR=os.devnull, **{CACHE_VARIABLE: tmp_path})
    assert "It is not a folder. Set TRITON_CACHE_DIR to a folder of your own." in error_text
    homeless = {CACHE_VARIABLE: "", "HOME": "/proc", "TMPDIR": tmp_path}
    note, *variables = refused_or_variables(**homeless).splitlines()
    folder = tmp_path / f"distributed-training-{os.geteuid()}"
    assert f"caches are in {folder}, because" in note
    assert f"set {CACHE_VARIABLE}" in note
    assert json.loads(variables[0])[CACHE_VARIABLE] == str(folder), (
        "its processes do not say it again"
    )


@pytest.mark.parametrize(
    "name", ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", CACHE_VARIABLE]
)
def test_cache_folders_writable_by_others_are_refused(name, tmp_path):
    folder = tmp_path / "shared"
    folder.mkdir()
    link = tmp_path / "link"
    link.symlink_to(folder)
    environment = {CACHE_VARIABLE: tmp_path / "own", name: link}
    folder.chmod(0o777)
    assert "Every user may write to it. Set " + name in refused_or_variables(**environment)
    folder.chmod(0o755)
    if os.geteuid() == 0:
        os.chown(folder, 12345, -1)
        assert "It belongs to user 12345. Set " + name in refused_or_variables(**environment)
        os.chown(folder, 0, -1)
    assert "TORCH_EXTENSIONS_DIR" in json.loads(refused_or_variables(**environment))


def test_a_symlinked_cache_folder_keeps_its_mode_and_is_checked(tmp_path):
    disk = tmp_path / "disk"
    for folder in (disk, tmp_path / "own"):
        folder.mkdir()
    (tmp_path / "own" / "inductor").symlink_to(disk)
    disk.chmod(0o755)
    assert "TORCH_EXTENSIONS_DIR" in json.loads(
        refused_or_variables(**{CACHE_VARIABLE: tmp_path / "own"})
    )
    assert disk.stat().st_mode & 0o777 == 0o755
    disk.chmod(0o777)
    assert "Every user may write to it" in refused_or_variables(
        **{CACHE_VARIABLE: tmp_path / "own"}
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_temporary_cache_folder_of_another_user_is_refused(tmp_path):
    (tmp_path / "distributed-training-0").mkdir()
    os.chown(tmp_path / "distributed-training-0", 12345, -1)
    error_text = refused_or_variables(**{CACHE_VARIABLE: os.devnull, "TMPDIR": tmp_path})
    assert "distributed-training-0 is not a safe place for code" in error_text
