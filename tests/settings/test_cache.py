"""What a machine keeps for later runs."""

import os
import subprocess
import sys
import time

from distributed_training.settings.files import ROOT

TORCH = "import cache, os; os.cpu_count = lambda: {}; cache.keep_bytecode(); import torch"


def start(tmp_path, num_cores=2, **environment):
    """What a process keeps that imports a package called torch, which none has compiled."""
    package = tmp_path / "site" / "torch" / "__init__.py"
    package.parent.mkdir(parents=True, exist_ok=True)
    package.touch()
    (package.parent / "more.py").touch()
    paths = [str(package.parents[1]), str(ROOT / "distributed_training/settings")]
    given = {
        **os.environ, "PYTHONPATH": os.pathsep.join(paths),
        "DISTRIBUTED_TRAINING_CACHE": str(tmp_path / "cache"), **environment,
    }  # fmt: skip
    given.pop("PYTHONPYCACHEPREFIX", None)
    subprocess.run([sys.executable, "-c", TORCH.format(num_cores)], env=given, check=True)
    return [path.relative_to(tmp_path) for path in tmp_path.rglob("*.pyc") if "torch" in path.parts]


def test_what_python_would_not_keep_is_kept_in_our_cache(tmp_path):
    (kept,) = start(tmp_path, PYTHONDONTWRITEBYTECODE="1")
    assert kept.parts[:2] == ("cache", "bytecode")


def test_many_cores_compile_what_is_not_imported_yet(tmp_path):
    start(tmp_path, 16, PYTHONDONTWRITEBYTECODE="1")
    end = time.monotonic() + 60
    while not list((tmp_path / "cache").rglob("more.*.pyc")):
        assert time.monotonic() < end
        time.sleep(0.1)


def test_what_python_keeps_stays_where_it_is(tmp_path):
    (kept,) = start(tmp_path, PYTHONDONTWRITEBYTECODE="")
    assert kept.parts[:2] == ("site", "torch")
    assert start(tmp_path, PYTHONDONTWRITEBYTECODE="1") == [kept]
