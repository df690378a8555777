"""What torch.compile makes of blocks and loss, as on GPUs by default: the same training."""

from __future__ import annotations

import functools
import shutil

import pytest

from tests.parity.test_layouts import accumulated, split
from tests.parity.test_strategies import BASE, GLOBAL_BATCH, assert_equal_runs, run_cases

NUM_STEPS = 6
# The kinds of parameters and hooks that a graph meets; the rest are products of these, of which
# one is here.
CASES = {
    2: {
        "dp": {"strategy": "dp", **accumulated(2, 2)},
        "fsdp": {"strategy": "fsdp", **accumulated(1, 2)},
        "zero3": {"strategy": "zero3", **accumulated(1, 2)},
        "tp2": {**split(tp=2), **accumulated(1)},
        "pp2": {**split(pp=2), **accumulated(4)},
        "pp2-recomputed": {
            **split(pp=2), **accumulated(4), "activation_checkpointing": "selective",
        },
        "hybrid": {"strategy": "hybrid", **accumulated(4)},
    },
    4: {"shard2-tp2": {**split(dp_shard=2, tp=2), **accumulated(1, 2)}},
}  # fmt: skip
NAMED = [(count, name) for count, cases in CASES.items() for name in cases]
pytestmark = pytest.mark.skipif(
    shutil.which("c++") is None, reason="no C++ compiler, which torch.compile needs on CPUs"
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """One process, not compiled."""
    cases = {"eager": {**BASE, "strategy": "dp", "batch_size": GLOBAL_BATCH}}
    return run_cases(cases, 1, tmp_path_factory.mktemp("eager"), steps=NUM_STEPS)["eager"]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """number of processes -> what its cases computed, run when first asked for."""

    @functools.cache
    def run(count):
        cases = {name: {**BASE, "compile": True, **values} for name, values in CASES[count].items()}
        return run_cases(cases, count, tmp_path_factory.mktemp(f"on{count}"), steps=NUM_STEPS)

    return run


@pytest.mark.parametrize(("count", "name"), NAMED, ids=[name for _, name in NAMED])
def test_compiled_layout_equals_one_eager_process(count, name, compiled, reference):
    assert_equal_runs(compiled(count)[name], reference)
