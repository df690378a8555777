"""What torch.compile makes of blocks and loss, as on GPUs by default: the same training."""

from __future__ import annotations

import functools
import shutil

import pytest

from tests.parity.support import BASE, DEEP, assert_equal_runs, cut, reference, run_cases, split

NUM_STEPS = 6
# The kinds of parameters and hooks that a graph meets; the rest are products of these, of which
# one is here. Sizes are the same where they can be, so that Inductor finds its code again.
CASES = {
    (2, "train"): {
        "dp": {"strategy": "dp", **cut(2)},
        "fsdp": {"strategy": "fsdp", **cut(2)},
        "tp2": {**split(tp=2), **cut(4)},
        "pp2-recomputed": {
            **split(pp=2), **cut(4), "activation_checkpointing": "selective",
        },
        "pp2-zb-h1": {**split(pp=2), **cut(4), "pipeline_schedule": "zb-h1"},
    },
    (1, "train"): {
        "whole": {"strategy": "dp", **cut(1), "compile": "whole", "loss_chunk_tokens": 100},
    },
    # Code that Inductor generates is run in those above, in fp32; how it is called, in these.
    (2, "train_without_code"): {
        "zero3": {"strategy": "zero3", **cut(1)},
        "hybrid": {"strategy": "hybrid", **cut(4)},
    },
    (4, "train_without_code"): {
        "tp2-pp2-zb-v": {
            **DEEP, **split(tp=2, pp=2), **cut(4), "pipeline_schedule": "zb-v",
        },
    },
}  # fmt: skip
NAMED = [(*how, name) for how, cases in CASES.items() for name in cases]
pytestmark = pytest.mark.skipif(
    shutil.which("c++") is None, reason="no C++ compiler, which torch.compile needs on CPUs"
)


@functools.cache
def compiled(count, what):
    """What these cases compute, run when first asked for."""
    cases = CASES[count, what].items()
    cases = {name: {**BASE, "compile": True, **values} for name, values in cases}
    return run_cases(cases, count, what=what, steps=NUM_STEPS)


@pytest.mark.parametrize(("count", "what", "name"), NAMED, ids=[name for *_, name in NAMED])
def test_compiled_layout_equals_one_eager_process(count, what, name):
    deep = CASES[count, what][name].get("model") == DEEP["model"]
    expected = reference(DEEP if deep else BASE, steps=NUM_STEPS)
    assert_equal_runs(compiled(count, what)[name], expected)
