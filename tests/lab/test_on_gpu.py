"""Test the lab's programs on real GPUs."""

import pickle
import time

import pytest
import torch

from results.lab.layouts import measure_gpu_seconds
from results.lab.overlap import main, read_run
from tests.conftest import assert_ok, only_record
from tests.gpu.test_gpu import BASE, pytestmark, run_script  # noqa: F401


def test_profiling_a_function_measures_its_gpu_time():
    a = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    began = time.perf_counter()
    _, busy = measure_gpu_seconds(lambda: (a @ a, torch.cuda._sleep(10_000_000), a @ a))
    assert 10_000_000 / 4e9 < busy <= time.perf_counter() - began  # no GPU runs at 4 GHz or more


@pytest.mark.parametrize("graphs", [False, True])
def test_a_profiled_run_writes_kernel_traces_and_memory_snapshots(graphs, tmp_path):
    count = min(2, torch.cuda.device_count())
    values = {
        **BASE, "strategy": "dp", "profile": 2, "max_steps": 20, "num_samples": 320,
        "cuda_graphs": graphs, "output_dir": tmp_path,
    }  # fmt: skip
    assert_ok(run_script(values, count))
    record = only_record(tmp_path)
    first = 15 if record["config"]["cuda_graphs"] else 6
    assert record["profile"] == {
        "first_step": first, "last_step": first + 1, "traces": "trace-rank*.json.gz",
        "memory": "memory-rank*.pickle",
    }  # fmt: skip
    folder = next(tmp_path.glob("*-*/record.json")).parent
    assert main([str(folder)]) == 0
    ranks = read_run(folder)
    assert len(ranks) == count
    for rank in ranks:
        assert rank.seconds()["computing"] > 0
        assert bool(rank.by_kind) == (count > 1)
        snapshot = pickle.loads((folder / f"memory-rank{rank.rank}.pickle").read_bytes())
        assert any(snapshot["segments"])
        assert graphs or any(snapshot["device_traces"])  # a replayed graph allocates almost nothing
