"""Test that the planner can use the results of `calibrate`."""

import dataclasses
import math
from types import SimpleNamespace

import pytest

from distributed_training.predict.rates import (
    FITTED,
    from_calibration,
    gpu_rates,
    tiled_multiplications,
)
from distributed_training.settings.machine import GPUS
from tests.conftest import light_pool


def test_a_machine_without_gpus_is_not_measured():
    refusal = light_pool().script(["plan", "--calibrate"])
    assert refusal.returncode == 2
    assert "--calibrate" in refusal.stderr


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
        "made_at": "2026-11-27",
    }
    base = dataclasses.replace(
        gpu_rates(GPUS["H200"]), num_sms=100, host=SimpleNamespace(block=2e-3)
    )
    rates = from_calibration(document, base)
    assert rates.gemm_flops == rates.fp32_gemm_flops == pytest.approx(flops)
    assert rates.attention_flops == pytest.approx(4e12)
    assert rates.link_bytes_per_s == pytest.approx(1e11, rel=0.01)
    assert rates.link_latency_s == pytest.approx(1e-5, rel=0.01)
    assert rates.host.block == pytest.approx(4e-3)
