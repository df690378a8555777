"""Test that the planner can use the results of `calibrate`."""

import dataclasses
import json
import math
from types import SimpleNamespace

import pytest

from distributed_training.predict.rates import (
    FITTED,
    cpu_rates,
    from_calibration,
    tiled_multiplications,
)
from distributed_training.predict.speed import estimate_step
from distributed_training.tools import calibrate, links
from tests.conftest import heavy_pool
from tests.planner.helpers import CPU_CALIBRATION, plan_for
from tests.support import CPU_MACHINE


def of_all(_arguments):
    """Run `calibrate` on this rank with very short measurements, and return the results."""
    calibrate.TOKENS = {"cpu": 16}
    calibrate.NUM_CALLS = 2
    with links.open_group(budget_s=0.0) as group:
        return calibrate.calibrate(group)


def test_two_processes_calibrate_together():
    document = heavy_pool().call("tests.tools.test_calibrate:of_all", None, num_processes=2)
    guess = cpu_rates(2, 2)
    rates = from_calibration(json.loads(json.dumps(document)), guess)
    assert rates.measured_at
    assert {entry["members"] for entry in document["collectives"]} == {2}
    for field in dataclasses.fields(rates):
        value = getattr(rates, field.name)
        if isinstance(value, float):
            assert 0 < value < math.inf, field.name
    for name in (
        "gemm_flops",
        "memory_bytes_per_s",
        "head_memory_bytes_per_s",
        "link_bytes_per_s",
        "kernel_s",
    ):
        assert getattr(rates, name) != getattr(guess, name), name
    assert rates.host == guess.host  # not measured


def test_calibrated_rates_predict_the_measured_step_time(monkeypatch, tmp_path):
    """Rates calibrated from a measured step must predict the duration of this step, including the
    time outside matrix multiplications."""
    seconds = iter((0.1, 0.03, 0.005))
    monkeypatch.setattr(calibrate, "time_in_step", lambda call: next(seconds))
    training = calibrate.time_training_on_cpu(CPU_CALIBRATION, CPU_MACHINE)
    assert training["training_s"]["head"] == pytest.approx(0.1 - 2 * 0.03)
    rates = from_calibration({**CPU_CALIBRATION, **training}, cpu_rates(CPU_MACHINE.num_cpus, 1))
    plan = plan_for(tmp_path, CPU_MACHINE, 1, model="gpt2-tiny", batch_size=4, max_length=512)
    predicted_s = estimate_step(plan, rates).seconds
    assert predicted_s == pytest.approx(0.105 + rates.host.step, rel=2e-3)


def test_rates_are_recovered_from_measured_times():
    """Recover known rates from simulated measurements: 10 TFLOP/s for matrix multiplications in
    whole tiles, 100 GB/s for links, and a host that needs twice the base time per block."""
    flops, k, n, tokens = 1e13, 1024, 1024, 2048
    shapes = {"forward": (tokens, k, n), "inputs": (tokens, n, k), "weights": (n, tokens, k)}
    measured_rates = {
        name: flops * math.prod(shape) / tiled_multiplications(*shape, 100)
        for name, shape in shapes.items()
    }
    products = [
        {"tokens": tokens, "in": k, "out": n, "dtype": dtype, "flops_per_s": measured_rates}
        for dtype in ("torch.bfloat16", "torch.float32")
    ]
    between = [
        {"members": 4, "bytes": size, "seconds": {"all_gather": 1e-5 + 0.75 * size / 1e11}}
        for size in (2**10, 2**30)
    ]
    half = FITTED.attention_half
    attention = [
        {"length": length, "flops_per_s": {"both": 4e12 * length / (length + half)}}
        for length in (512, 1024)
    ]
    document = {
        "matrix_products": products,
        "memory_bytes_per_s": {"add": 9.0, "gelu": 1e12, "adamw": 1e12},
        "attention": attention,
        "seconds": {"kernel": 5e-6, "launch": 5e-6, "compiled_block": 2 * FITTED.launching_s.block},
        "collectives": between,
    }
    base = dataclasses.replace(
        cpu_rates(2, 1), num_sms=100, host=SimpleNamespace(block=2e-3), on_host=False
    )
    rates = from_calibration(document, base)
    assert rates.gemm_flops == rates.fp32_gemm_flops == pytest.approx(flops)
    assert rates.attention_flops == pytest.approx(4e12)
    assert rates.link_bytes_per_s == pytest.approx(1e11, rel=0.01)
    assert rates.link_latency_s == pytest.approx(1e-5, rel=0.01)
    assert rates.host.block == pytest.approx(4e-3)
