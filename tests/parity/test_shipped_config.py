"""Test that every strategy runs with the shipped CONFIG and gives the same losses as a
single-process run."""

import pytest

from distributed_training.planner.checks import has_libaio
from distributed_training.settings.keys import Options
from distributed_training.settings.strategies import list_strategies, strategy_options
from real_model_example import CONFIG
from tests.parity.support import LOSS_TOLERANCE, reference, run_cases

# Local SGD gives different results. test_fewer_bytes.py tests it.
STRATEGIES = [name for name in list_strategies() if strategy_options(name) is Options]
# These numbers would differ on another machine.
SAME_EVERYWHERE = {"dataset": "embedded", "tokenizer": "embedded", "weights": "random"}


@pytest.mark.parametrize("count", [2, 4])
def test_changing_only_the_strategy_keeps_the_losses(count, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "tokenized-once"
    shipped = {**CONFIG, **SAME_EVERYWHERE, "output_dir": str(folder)}
    left_out = () if has_libaio() else ("infinity",)
    names = [n for n in STRATEGIES if (n == "3d") == (count == 4) and n not in left_out]
    cases = {name: {**shipped, "strategy": name} for name in names}
    found = run_cases(cases, count)
    whole = {**shipped, "strategy": "dp", "global_batch": CONFIG["batch_size"] * count}
    expected = reference(whole)["losses"]
    for name, values in found.items():
        assert values["losses"] == pytest.approx(expected, rel=LOSS_TOLERANCE), name
