"""What torch.compile makes of blocks and loss, as on GPUs by default: the same training."""

from __future__ import annotations

import functools
import shutil

import pytest

from distributed_training.settings.files import ROOT
from tests.parity.support import DEEP, assert_equal_runs, cut, reference, run_cases, split

NUM_STEPS = 6
TINY = {**DEEP, "model": "gpt2-tiny"}
# The kinds of parameters and hooks that a graph meets; the rest are products of these, of which
# one is here.
CASES = {
    # Code that Inductor generates is run in these, in fp32; how it is called, in the others.
    (2, "train"): {"dp": {"strategy": "dp", **cut(2)}, "tp2": {**split(tp=2), **cut(4)}},
    (1, "train_without_code"): {
        "whole": {"strategy": "dp", **cut(1), "compile": "whole", "loss_chunk_tokens": 100}
    },
    (2, "train_without_code"): {
        "fsdp": {"strategy": "fsdp", **cut(2)},
        "pp2-recomputed": {**split(pp=2), **cut(4), "activation_checkpointing": "selective"},
        "pp2-zb-h1": {**split(pp=2), **cut(4), "pipeline_schedule": "zb-h1"},
        "zero3": {"strategy": "zero3", **cut(1)},
        "hybrid": {"strategy": "hybrid", **cut(4)},
        # The only family whose blocks take what the embedding returns as it is.
        "tied-tp2": {"model": str(ROOT / "tests/models/grouped"), **split(tp=2), **cut(1)},
    },
    (4, "train_without_code"): {
        "tp2-pp2-zb-v": {**DEEP, **split(tp=2, pp=2), **cut(4), "pipeline_schedule": "zb-v"}
    },
}
NAMED = [(*how, name) for how, cases in CASES.items() for name in cases]
pytestmark = pytest.mark.skipif(
    shutil.which("c++") is None, reason="no C++ compiler, which torch.compile needs on CPUs"
)


@functools.cache
def compiled(count, what):
    """What these cases compute, run when first asked for."""
    cases = CASES[count, what].items()
    cases = {name: {**TINY, "compile": True, **values} for name, values in cases}
    return run_cases(cases, count, what=what, steps=NUM_STEPS)


@pytest.mark.parametrize(("count", "what", "name"), NAMED, ids=[name for *_, name in NAMED])
def test_compiled_layout_equals_one_eager_process(count, what, name):
    model = CASES[count, what][name].get("model", TINY["model"])
    expected = reference({**TINY, "model": model}, steps=NUM_STEPS)
    assert_equal_runs(compiled(count, what)[name], expected)
