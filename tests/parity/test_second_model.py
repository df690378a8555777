"""A second model, in a folder outside the package, trains under every strategy as on one process.

It is as unlike GPT-2 as the seam allows (tests/models/rotary): what parallel/ and engines/ know of
a model is what every family says of itself.
"""

from __future__ import annotations

import functools

import pytest

from distributed_training.settings.files import ROOT
from tests.parity.support import BASE, assert_equal_runs, cut, reference, run_cases, split

FAMILY = ROOT / "tests/models/rotary"
SECOND = {**BASE, "model": str(FAMILY), "tokenizer": "embedded", "seed": 7}
UNTIED = {"model": f"{FAMILY}:untied"}
NUM_STEPS = 6
# The word before the slash names the reference.
CASES = {
    2: {
        "tied/dp": {"strategy": "dp", **cut(2)},
        "tied/fsdp": {"strategy": "fsdp", **cut(2)},
        "tied/zero2": {"strategy": "zero2", **cut(2)},
        "tied/zero3": {"strategy": "zero3", **cut(1)},
        "tied/tp2": {**split(tp=2), **cut(2)},
        "tied/tp2-whole-norms": {
            **split(tp=2), **cut(1), "sequence_parallel": False,
            "activation_checkpointing": "full",
        },
        "tied/pp2-1f1b": {**split(pp=2), **cut(4), "pipeline_cut": "4,2"},
        "tied/pp2-zb-v": {**split(pp=2), **cut(4), "pipeline_schedule": "zb-v"},
        "tied/hybrid": {"strategy": "hybrid", **cut(4)},
        "untied/fsdp": {**UNTIED, "strategy": "fsdp", **cut(1)},
        "untied/zero3": {**UNTIED, "strategy": "zero3", **cut(1)},
        "untied/pp2-zb-v": {
            **UNTIED, **split(pp=2), **cut(4), "pipeline_schedule": "zb-v",
        },
        "untied/hybrid": {**UNTIED, "strategy": "hybrid", **cut(4)},
    },
    4: {
        "tied/shard2-tp2": {**split(dp_shard=2, tp=2), **cut(2)},
        "tied/shard2-pp2-zb-v": {
            **split(dp_shard=2, pp=2), **cut(4), "pipeline_schedule": "zb-v",
        },
        "untied/tp2-pp2": {**UNTIED, **split(tp=2, pp=2), **cut(4)},
    },
}  # fmt: skip
NAMED = [(count, name) for count, cases in CASES.items() for name in cases]


@functools.cache
def results(count):
    """What the cases of so many processes compute, run when first asked for."""
    cases = {name: {**SECOND, **values} for name, values in CASES[count].items()}
    return run_cases(cases, count, steps=NUM_STEPS)


def on_one(name):
    """The run that a case is compared with."""
    values = UNTIED if name.startswith("untied") else {}
    return reference({**SECOND, **values}, steps=NUM_STEPS)


@pytest.mark.parametrize(("count", "name"), NAMED, ids=[name for _, name in NAMED])
def test_second_model_equals_one_process(count, name):
    assert_equal_runs(results(count)[name], on_one(name))


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_the_second_model_learns(name):
    losses = on_one(name)["losses"]
    assert losses[-1] < losses[0] - 0.02
