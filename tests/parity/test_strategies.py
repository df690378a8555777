"""Every strategy computes what one process computes: losses, gradient norms, final weights."""

from __future__ import annotations

import functools

import pytest

from distributed_training.advise.checks import has_libaio
from tests.parity.support import BASE, assert_equal_runs, reference, run_cases, small_infinity

STRATEGIES = ("dp", "fsdp", "zero1", "zero2", "zero3", "offload", "infinity")
VARIANTS = {
    "packed-2": {"batch_size": 2, "grad_accum_steps": 2},
    "padded-2": {
        "batch_size": 2, "grad_accum_steps": 2, "pack": False, "loss_chunk_tokens": 50,
    },
}  # fmt: skip


@functools.cache
def on_two_processes(strategy):
    """What each variant of a strategy computes."""
    # With the buffers of its own JSON infinity is in test_shipped_config.py.
    own = {"strategy": strategy} if strategy != "infinity" else small_infinity()
    return run_cases({name: {**BASE, **own, **VARIANTS[name]} for name in VARIANTS}, 2)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategy_equals_one_process(strategy, variant):
    if strategy == "infinity" and not has_libaio():
        pytest.skip("libaio is not installed and could not be fetched")
    expected = reference({**BASE, "pack": not variant.startswith("padded")})
    assert_equal_runs(on_two_processes(strategy)[variant], expected)
