"""One word changed in the shipped CONFIG: every strategy starts, and does the same work."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile

import pytest

from distributed_training.advise.checks import has_libaio
from distributed_training.settings.keys import Options
from distributed_training.settings.strategies import list_strategies, strategy_options
from real_model_example import CONFIG
from tests.parity.support import LOSS_TOLERANCE, reference, run_cases

NUM_STEPS = 4
# Local SGD computes something else: test_fewer_bytes.py.
STRATEGIES = [name for name in list_strategies() if strategy_options(name) is Options]
ON = {2: [name for name in STRATEGIES if name != "3d"], 4: ["3d"]}
NAMED = [(count, name) for count, names in ON.items() for name in names]
# Where it would have other numbers on another machine.
SAME_EVERYWHERE = {"dataset": "embedded", "tokenizer": "embedded", "weights": "random"}


@functools.cache
def losses(count, names):
    """Strategy -> losses on so many processes."""
    cases = {name: {**shipped(), "strategy": name} for name in names}
    found = run_cases(cases, count, steps=NUM_STEPS)
    return {name: values["losses"] for name, values in found.items()}


def shipped():
    return {**CONFIG, **SAME_EVERYWHERE, "output_dir": output_dir()}


@functools.cache
def output_dir():
    """Where the text is tokenised once for all groups of processes."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@pytest.mark.parametrize(("count", "name"), NAMED, ids=[f"{name}-on{n}" for n, name in NAMED])
def test_the_word_strategy_is_all_that_changes(count, name):
    names = ("infinity",) if name == "infinity" else tuple(n for n in ON[count] if n != "infinity")
    if name == "infinity" and not has_libaio():
        pytest.skip("libaio is not installed and could not be fetched")
    whole = {**shipped(), "strategy": "dp", "global_batch": CONFIG["batch_size"] * count}
    expected = reference(whole, steps=NUM_STEPS)["losses"]
    assert losses(count, names)[name] == pytest.approx(expected, rel=LOSS_TOLERANCE)


def test_no_strategy_is_left_out():
    assert {name for _, name in NAMED} == set(STRATEGIES)
