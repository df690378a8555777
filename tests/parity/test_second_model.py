"""Llama's family trains under every strategy as on one process.

It is as unlike GPT-2 as the seam allows: what parallel/ and engines/ know of a model is what every
family says of itself.
"""

from __future__ import annotations

import functools

import pytest

from distributed_training.settings.files import ROOT
from tests.parity.support import BASE, assert_equal_runs, cut, reference, run_cases, split

# Grouped heads with norms, tied; and biases, scaled positions, an output layer of its own.
TIED = {"model": str(ROOT / "tests/models/grouped")}
UNTIED = {"model": str(ROOT / "tests/models/untied")}
SECOND = {**BASE, **TIED, "tokenizer": "embedded", "seed": 7}
NUM_STEPS = 6
# The word before the slash names the reference.
CASES = {
    "tied/zero2": {"strategy": "zero2", **cut(2)},
    "tied/tp2": {**split(tp=2), **cut(2)},
    "tied/tp2-whole-norms": {
        **split(tp=2), **cut(1), "sequence_parallel": False, "activation_checkpointing": "full",
    },
    # The only family whose blocks take what the embedding returns as it is.
    "tied/tp2-compiled": {**split(tp=2), **cut(1), "compile": True},
    "tied/pp2-zb-v": {**split(pp=2), **cut(4), "pipeline_schedule": "zb-v"},
    "tied/hybrid": {"strategy": "hybrid", **cut(4)},
    "untied/fsdp": {**UNTIED, "strategy": "fsdp", **cut(1)},
    "untied/pp2-zb-v": {**UNTIED, **split(pp=2), **cut(4), "pipeline_schedule": "zb-v"},
    "untied/hybrid": {**UNTIED, "strategy": "hybrid", **cut(4)},
}  # fmt: skip


@functools.cache
def results():
    """What the cases compute on two processes, run when first asked for."""
    cases = {name: {**SECOND, **values} for name, values in CASES.items()}
    return run_cases(cases, 2, steps=NUM_STEPS)


def on_one(name):
    """The run that a case is compared with."""
    values = UNTIED if name.startswith("untied") else {}
    return reference({**SECOND, **values}, steps=NUM_STEPS)


@pytest.mark.parametrize("name", CASES)
def test_second_model_equals_one_process(name):
    assert_equal_runs(results()[name], on_one(name))
