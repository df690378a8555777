"""What a machine keeps for later runs."""

import os
import subprocess
import sys
import time

import pytest

from distributed_training.settings.files import ROOT

TORCH = "import cache, os; os.cpu_count = lambda: {}; cache.keep_bytecode(); import torch"


def start(tmp_path, dont_write, num_cores=2):
    """What a process keeps that imports a package called torch, which none has compiled."""
    package = tmp_path / "site" / "torch" / "__init__.py"
    package.parent.mkdir(parents=True, exist_ok=True)
    package.touch()
    (package.parent / "more.py").touch()
    paths = [str(package.parents[1]), str(ROOT / "distributed_training/settings")]
    given = {
        **os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": dont_write,
        "DISTRIBUTED_TRAINING_CACHE": str(tmp_path / "cache"),
    }  # fmt: skip
    given.pop("PYTHONPYCACHEPREFIX", None)
    subprocess.run([sys.executable, "-c", TORCH.format(num_cores)], env=given, check=True)
    return [path.relative_to(tmp_path) for path in tmp_path.rglob("*.pyc") if "torch" in path.parts]


@pytest.mark.parametrize(("dont_write", "place"), [("1", "cache/bytecode"), ("", "site/torch")])
def test_bytecode_is_kept_by_python_or_else_in_our_cache(dont_write, place, tmp_path):
    kept = start(tmp_path, dont_write)
    assert [str(path).startswith(place) for path in kept] == [True]
    assert start(tmp_path, "1") == kept, "once"


def test_beside_a_compiled_torch_the_rest_is_kept_too(tmp_path):
    start(tmp_path, "")
    (tmp_path / "site" / "torch" / "__init__.py").write_text("import torch.more")
    assert {path.stem.partition(".")[0] for path in start(tmp_path, "1")} == {"__init__", "more"}


def test_many_cores_compile_what_is_not_imported_yet(tmp_path):
    start(tmp_path, "1", num_cores=16)
    end = time.monotonic() + 60
    while not list((tmp_path / "cache").rglob("more.*.pyc")):
        assert time.monotonic() < end
        time.sleep(0.1)
