"""Test packed records under every strategy. Losses, gradients and weights must equal the results of
a run with the same records in separate rows."""

import pytest

from tests.parity.support import (
    BASE,
    DEEP,
    assert_equal_runs,
    mesh,
    micro_batches,
    reference,
    run_selected,
)
from tests.parity.test_layouts import COMPILED, FULL, HYBRID, LLAMAS, SELECTIVE, UNTIED, ZB_V
from tests.support import small_records

PACKED = {"dataset": str(small_records()), "pack": "auto", "num_samples": 200, "eval_samples": 10}
MODELS = {
    "gpt2": {**BASE, **PACKED},
    "deep": {**DEEP, **PACKED},
    # grouped-query attention with norms
    "tied": {**BASE, **UNTIED, "model": str(LLAMAS / "grouped"), **PACKED},
    "untied": {**BASE, **UNTIED, **PACKED},
}
CASES = {
    1: {"gpt2/dp-traced": {"strategy": "dp", **micro_batches(2), **COMPILED}},
    2: {
        "gpt2/dp": {"strategy": "dp", **micro_batches(2), **FULL},
        # Between the layers that tp shards, activations are sharded by tokens, or by samples
        # (tied/tp2).
        "gpt2/tp2-by-tokens": {**mesh(tp=2), **micro_batches(8)},
        "deep/pp2-zb-v": {**mesh(pp=2), **micro_batches(4), **ZB_V},
        "deep/hybrid": {**HYBRID, **micro_batches(4), **SELECTIVE},
        "tied/fsdp-traced": {"strategy": "fsdp", **micro_batches(2), **COMPILED},
        "tied/tp2": {**mesh(tp=2), **micro_batches(2)},
    },
    4: {
        "gpt2/cp4": {**mesh(cp=4), **micro_batches(2)},
        "untied/tp2-pp2": {**mesh(tp=2, pp=2), **micro_batches(2)},
    },
}  # fmt: skip
NAMED = [(count, name) for count, cases in CASES.items() for name in cases]


@pytest.fixture(scope="module")
def results(request):
    options = {"function": "train_without_inductor"}
    return run_selected(request, CASES, lambda name: MODELS[name.split("/")[0]], **options)


@pytest.mark.parametrize(("count", "name"), NAMED)
def test_packed_records_equal_separate_records(count, name, results):
    alone = reference(MODELS[name.split("/")[0]], function="train_unpacked")
    found = results(count)[name]
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert_equal_runs(found, alone)
