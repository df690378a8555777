"""Test preference tuning under every strategy against one process. Pairs of answers are packed, so
that a sample has several, or one per sample."""

import functools
import math

import pytest
import torch

from tests.parity.support import (
    BASE,
    DEEP,
    assert_equal_runs,
    mesh,
    micro_batches,
    reference,
    run_cases,
)
from tests.parity.test_layouts import CHUNKED, COMPILED, FULL, HYBRID, SELECTIVE, UNTIED, ZB_V
from tests.support import small_pairs

PAIRS = {"dataset": str(small_pairs()), "num_samples": -1, "max_length": 64, "preference": "dpo"}
LOSSES = {
    "dpo": {"pack": True, "preference_label_smoothing": 0.1, "preference_sft": 0.5},
    "ipo": {"preference": "ipo"},
    "simpo": {"preference": "simpo", "preference_beta": 2.0, "preference_margin": 0.5},
    "orpo": {"preference": "orpo", "pack": True},
    "deep": {"model": DEEP["model"], "weights": "random", "seed": 7, "pack": True},
    "lora": {**UNTIED, "lora_rank": 4, "learning_rate": 1e-2},
}
LOSSES = {name: {**BASE, **values, **PAIRS, **values} for name, values in LOSSES.items()}
CASES = {
    1: {"dpo/dp-traced": {"strategy": "dp", **micro_batches(2), **COMPILED}},
    2: {
        "dpo/dp": {"strategy": "dp", **micro_batches(2), **FULL},
        "ipo/fsdp": {"strategy": "fsdp", **micro_batches(1), **SELECTIVE},
        "dpo/zero1": {"strategy": "zero1", **micro_batches(2)},
        "orpo/zero2": {"strategy": "zero2", **micro_batches(1)},
        "dpo/zero3": {"strategy": "zero3", **micro_batches(2), **CHUNKED},
        "dpo/tp2-by-tokens": {**mesh(tp=2), **micro_batches(8)},
        "simpo/tp2": {**mesh(tp=2), **micro_batches(2), **CHUNKED},
        "orpo/cp2": {**mesh(cp=2), **micro_batches(2)},
        "deep/pp2-1f1b": {**mesh(pp=2), **micro_batches(4), **FULL},
        "deep/pp2-zb-v": {**mesh(pp=2), **micro_batches(4), **ZB_V},
        "deep/hybrid": {**HYBRID, **micro_batches(4)},
        "lora/fsdp": {"strategy": "fsdp", **micro_batches(1)},
    },
    4: {
        "dpo/cp4": {**mesh(cp=4), **micro_batches(2)},
        "dpo/shard2-cp2": {**mesh(dp_shard=2, cp=2), **micro_batches(1), **FULL},
        "dpo/tp2-pp2": {**mesh(tp=2, pp=2), **micro_batches(2)},
    },
}  # fmt: skip
NUM_STEPS = 3
NAMED = [(count, name) for count, cases in CASES.items() for name in cases]


@pytest.fixture(scope="module")
def results(request):
    """Return a function that returns the results of all selected cases for a given number of
    processes. Results are computed on the first call."""
    chosen = {item.name for item in request.session.items}

    @functools.cache
    def run(count):
        cases = {
            name: {**LOSSES[name.split("/")[0]], **values}
            for name, values in CASES[count].items()
            if any(f"[{count}-{name}]" in item for item in chosen)
        }
        return run_cases(cases, count, function="train_without_inductor", steps=NUM_STEPS)

    return run


@pytest.mark.parametrize(("count", "name"), NAMED)
def test_layout_equals_one_process(count, name, results):
    kind = name.split("/")[0]
    alone = reference(LOSSES[kind], steps=NUM_STEPS)
    found = results(count)[name]
    assert_equal_runs(found, alone)
    if kind in ("deep", "lora"):
        assert found["losses"][0] == pytest.approx(math.log(2), abs=1e-6)
    assert found["losses"][0] == pytest.approx(alone["losses"][0], abs=1e-6)


@pytest.mark.parametrize("strategy", ["dp", "fsdp"])
def test_bf16_begins_at_ln_2(strategy):
    values = {**LOSSES["deep"], "precision": "bf16", "strategy": strategy, **micro_batches(2)}
    (found,) = run_cases({"bf16": values}, 2, steps=1).values()
    assert found["losses"][0] == pytest.approx(math.log(2), abs=1e-3)
    assert torch.isfinite(torch.tensor(found["grad_norms"])).all()
