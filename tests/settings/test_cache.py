"""What a machine keeps for later runs."""

import os
import subprocess
import sys

from distributed_training.settings.files import ROOT

TORCH = "import cache, sys; cache.keep_bytecode(); import torch"


def start(tmp_path, **environment):
    """A process that imports a package called torch, which no process has compiled."""
    package = tmp_path / "site" / "torch" / "__init__.py"
    package.parent.mkdir(parents=True, exist_ok=True)
    package.touch()
    paths = [str(package.parents[1]), str(ROOT / "distributed_training/settings")]
    given = {
        **os.environ, "PYTHONPATH": os.pathsep.join(paths),
        "DISTRIBUTED_TRAINING_CACHE": str(tmp_path / "cache"), **environment,
    }  # fmt: skip
    given.pop("PYTHONPYCACHEPREFIX", None)
    subprocess.run([sys.executable, "-c", TORCH], env=given, check=True)
    return [path.relative_to(tmp_path) for path in tmp_path.rglob("*.pyc") if "torch" in path.parts]


def test_what_python_would_not_keep_is_kept_in_our_cache(tmp_path):
    (kept,) = start(tmp_path, PYTHONDONTWRITEBYTECODE="1")
    assert kept.parts[:2] == ("cache", "bytecode")


def test_what_python_keeps_stays_where_it_is(tmp_path):
    (kept,) = start(tmp_path, PYTHONDONTWRITEBYTECODE="")
    assert kept.parts[:2] == ("site", "torch")
    assert start(tmp_path, PYTHONDONTWRITEBYTECODE="1") == [kept]
