"""Adapters beside frozen weights: as a plain PyTorch loop, and under every strategy alike."""

from __future__ import annotations

import functools

import pytest

from tests.parity.support import DEEP, assert_equal_runs, cut, reference, run_cases, split

LORA = {**DEEP, "lora_rank": 4, "lora_alpha": 8.0}
CASES = {
    "dp": {"strategy": "dp", **cut(2)},
    "fsdp": {"strategy": "fsdp", **cut(2)},
    "tp2": {**split(tp=2), **cut(2)},
    "tp2-whole": {**split(tp=2), **cut(1), "sequence_parallel": False},
    "pp2-1f1b": {**split(pp=2), **cut(2)},
    "pp2-zb-v": {**split(pp=2), **cut(4), "pipeline_schedule": "zb-v"},
    "zero2": {"strategy": "zero2", **cut(2)},
    "zero3": {"strategy": "zero3", **cut(2)},
    "offload": {"strategy": "offload", **cut(2)},
    "hybrid": {"strategy": "hybrid", **cut(4)},
}


@functools.cache
def results():
    return run_cases({name: {**LORA, **values} for name, values in CASES.items()}, 2)


@pytest.mark.parametrize("name", CASES)
def test_lora_equals_one_process(name):
    assert_equal_runs(results()[name], reference(LORA))
