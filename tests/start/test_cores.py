import os

import pytest

from distributed_training.predict.rates import FITTED
from distributed_training.settings.cache import CACHE_VARIABLE
from distributed_training.start import cores


@pytest.mark.processes
def test_cores_are_measured_every_ten_minutes_if_torch_is_installed(tmp_path, monkeypatch):
    (tmp_path / "distributed_training").mkdir()  # The package is found from any folder.
    (tmp_path / "distributed_training/__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    cache = tmp_path / "cache"
    monkeypatch.setenv(CACHE_VARIABLE, str(cache))
    rates = cores.recent_cores(2, 2)
    assert rates.keys() == vars(FITTED.cpu_core).keys()
    assert 1e8 < rates["fp32_gemm_flops"] < 1e14
    assert 1e7 < rates["memory_bytes"] < 1e13
    monkeypatch.setattr(cores, "find_spec", {"torch": None}.get)
    assert cores.recent_cores(2, 2) == rates
    for file in cache.iterdir():
        os.utime(file, (0, 0))
    assert cores.recent_cores(2, 2) is None
