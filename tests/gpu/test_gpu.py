"""On real GPUs: what the CPU tests cannot see. Run with: bash tests/run.sh tests/gpu -m gpu"""

from __future__ import annotations

import json
import os
import sys
import time

import pytest
import torch

from tests.conftest import assert_ok, only_record, run_command, settings
from tests.parity.support import BASE, DEEP, GLOBAL_BATCH, assert_equal_runs, run_cases
from tests.parity.test_layouts import CASES as LAYOUTS
from tests.pool import SCRIPT

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(
    str(index) for index in range(torch.cuda.device_count())
)
STRATEGIES = ("dp", "fsdp", "zero1", "zero2", "zero3", "offload")
# fp32 without TF32; kernels for GPUs sum in other orders than one another.
EAGER = {**BASE, "compile": False, "batch_size": 8}


@pytest.fixture(scope="module")
def runs():
    """One GPU: eager reference, compiled with and without accumulation, every strategy."""
    cases = {"reference": {**EAGER, "strategy": "dp"}}
    for strategy in STRATEGIES:
        values = {**BASE, "strategy": strategy, "compile": True}
        cases[strategy] = {**values, "batch_size": 8}
        cases[f"{strategy} accumulating"] = {**values, "batch_size": 4, "grad_accum_steps": 2}
    return run_cases(cases, 1, CUDA_VISIBLE_DEVICES=VISIBLE.split(",")[0])


@pytest.mark.parametrize("suffix", ["", " accumulating"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_compiled_strategy_equals_eager_on_one_gpu(strategy, suffix, runs):
    assert_equal_runs(runs[strategy + suffix], runs["reference"])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_every_strategy_on_two_gpus_equals_one(runs):
    cases = {
        strategy: {**BASE, "strategy": strategy, "compile": True, "batch_size": 4}
        for strategy in STRATEGIES
    }
    two = run_cases(cases, 2, CUDA_VISIBLE_DEVICES=",".join(VISIBLE.split(",")[:2]))
    for strategy in STRATEGIES:
        assert_equal_runs(two[strategy], runs["reference"])


@pytest.mark.parametrize("data", ["packed", "padded"])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_layouts_on_several_gpus_equal_one(count, data):
    """Over NCCL, and compiled where that can be."""
    if torch.cuda.device_count() < count:
        pytest.skip(f"fewer than {count} GPUs")
    base = {**DEEP, "pack": data == "packed"}
    cases = {
        name: {**base, **values}
        for name, values in LAYOUTS[count].items()
        if name.startswith(f"{data}/")
    }
    cases["hybrid"] = {**base, "strategy": "hybrid", "global_batch": GLOBAL_BATCH}
    whole = {**base, "compile": False, "strategy": "dp", "batch_size": GLOBAL_BATCH}
    one, *_ = gpus = VISIBLE.split(",")
    reference = run_cases({data: whole}, 1, CUDA_VISIBLE_DEVICES=one)[data]
    found = run_cases(cases, count, CUDA_VISIBLE_DEVICES=",".join(gpus[:count]))
    for name, values in found.items():
        print(f"comparing {name}")
        assert_equal_runs(values, reference)


def test_a_profiled_function_shows_how_long_the_gpu_computed():
    from distributed_training.measure.layouts import profiled

    a = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    began = time.perf_counter()
    _, busy = profiled(lambda: (a @ a, torch.cuda._sleep(10_000_000), a @ a))
    assert 10_000_000 / 4e9 < busy <= time.perf_counter() - began  # no GPU has a clock of 4 GHz


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_learns_and_records_memory(precision, tmp_path):
    values = {
        **BASE, "strategy": "dp", "precision": precision, "output_dir": tmp_path, "epochs": 1,
        "num_samples": 320, "max_length": 64, "warmup_steps": 0,
    }  # fmt: skip
    command = [sys.executable, SCRIPT, *settings(values)]
    assert_ok(run_command(command, CUDA_VISIBLE_DEVICES=VISIBLE.split(",")[0]))
    record = only_record(tmp_path)
    assert record["status"] == "ok"
    assert record["loss_curve"][-1][1] < record["loss_curve"][0][1] - 0.5
    assert record["memory"]["peak_reserved_bytes"] > record["memory"]["peak_allocated_bytes"] / 2
    assert json.dumps(record["dtypes"]).count("float") >= 5


def test_out_of_memory_is_recorded_and_explained(tmp_path):
    values = {
        "model": "gpt2-large", "dataset": "embedded", "tokenizer": "embedded", "weights": "random",
        "strategy": "dp", "batch_size": 2048, "max_length": 1024, "epochs": 1, "num_samples": -1,
        "output_dir": tmp_path, "compile": False, "eval_samples": 1, "checkpoint_every": 0,
    }  # fmt: skip
    command = [sys.executable, SCRIPT, *settings(values)]
    result = run_command(command, CUDA_VISIBLE_DEVICES=VISIBLE.split(",")[0])
    assert result.returncode == 1
    assert "out of GPU memory" in result.stderr
    assert "batch_size=1024" in result.stderr
    assert "Traceback" not in result.stderr
    assert only_record(tmp_path)["status"] == "oom"
