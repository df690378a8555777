"""What cpu.py keeps of a run."""

from __future__ import annotations

from distributed_training.settings.files import load_json
from distributed_training.settings.strategies import list_strategies, strategy_options
from results.lab.cpu import COUNTS, PLAN


def test_every_strategy_is_in_the_plan():
    """But those whose engine changes the work."""
    names = [run["strategy"] for run in load_json(PLAN, "plan")["runs"]]
    assert names == [name for name in list_strategies() if not strategy_options(name).model_fields]
    assert sorted(COUNTS) == [1, 2, 4]
