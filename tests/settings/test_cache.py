"""Test the caches that later runs on the same machine use."""

import os
from pathlib import Path

import pytest

from distributed_training.settings.cache import CACHE_VARIABLE, use_private_caches
from tests.support import refused

NAMES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", CACHE_VARIABLE)


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """Replace the environment with one that names only this suite's cache folder."""
    values = {CACHE_VARIABLE: str(tmp_path / "own")}
    monkeypatch.setattr(os, "environ", values)
    return values


def test_code_that_torch_compiles_is_stored_where_no_other_user_can_write(environment, tmp_path):
    use_private_caches()
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR"):
        folder = Path(environment[name])
        assert folder.is_relative_to(tmp_path / "own")
        assert {path.stat().st_mode & 0o777 for path in (folder, tmp_path / "own")} == {0o700}


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_folder_that_cannot_be_created_is_refused(name, environment):
    environment[name] = "/dev/null/cache"
    with refused("/dev/null/cache", name):
        use_private_caches()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("name", NAMES)
def test_code_caches_of_another_user_are_refused(name, environment, tmp_path):
    environment[name] = str(tmp_path)
    os.chown(tmp_path, 12345, -1)
    with refused("12345", name):
        use_private_caches()
