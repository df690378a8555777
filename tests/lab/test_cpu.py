"""What cpu.py keeps of a run."""

from __future__ import annotations

import pytest

from distributed_training.settings.files import load_json
from distributed_training.settings.strategies import list_strategies, strategy_options
from results.lab.cpu import COUNTS, PLAN, entry
from tests.support import made_record


@pytest.mark.parametrize("timed", [False, True])
def test_time_is_kept_only_where_it_means_something(timed):
    record = made_record(config_requested={"strategy": "fsdp", "output_dir": "/home/me"})
    assert entry(record, timed) == {
        "processes": 4, "config": {"strategy": "fsdp"}, "peak_host_bytes": 5 * 2**30,
        "step_time_s": 0.125 if timed else None,
    }  # fmt: skip


def test_every_strategy_is_in_the_plan():
    """But those whose engine changes the work."""
    names = [run["strategy"] for run in load_json(PLAN, "plan")["runs"]]
    assert names == [name for name in list_strategies() if not strategy_options(name).model_fields]
    assert sorted(COUNTS) == [1, 2, 4]
