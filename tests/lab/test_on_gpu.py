"""Test the lab's programs on real GPUs."""

import pytest
import torch

from results.lab.overlap import main, read_run
from tests.conftest import assert_ok
from tests.gpu.test_gpu import BASE, pytestmark, run_script  # noqa: F401


@pytest.mark.parametrize("graphs", [False, True])
def test_a_profiled_run_writes_kernel_traces(graphs, tmp_path):
    count = min(2, torch.cuda.device_count())
    values = {
        **BASE, "strategy": "dp", "profile": 2, "max_steps": 20, "num_samples": 320,
        "cuda_graphs": graphs, "output_dir": tmp_path,
    }  # fmt: skip
    assert_ok(run_script(values, count))
    folder = next(tmp_path.glob("*-*/record.json")).parent
    assert main([str(folder)]) == 0
    ranks = read_run(folder)
    assert len(ranks) == count
    for rank in ranks:
        assert rank.seconds()["computing"] > 0
        assert bool(rank.by_kind) == (count > 1)
