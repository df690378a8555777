"""Published losses of smaller and fewer exchanges: the table is the runs', bytes the formulas'."""

from __future__ import annotations

import json

import pytest

from distributed_training.advise.make import draft_plan
from distributed_training.predict.traffic import sent_by_axis
from distributed_training.settings.config import build_config
from distributed_training.settings.files import ROOT
from distributed_training.settings.strategies import strategy_options
from results.lab.exchanges import PLAN, summarise
from tests.support import CPU_MACHINE

RECORD = json.loads((ROOT / "results/records/cpu-exchanges/gpt2-tiny.json").read_text())


def test_the_table_is_the_runs():
    assert list(RECORD["runs"]) == list(PLAN["cases"])
    assert all(set(seeds) == {"1", "2", "3"} for seeds in RECORD["runs"].values())
    assert RECORD["after_training"] == summarise(RECORD["runs"])
    assert (RECORD["cases"], RECORD["base"]) == (PLAN["cases"], PLAN["common"])


@pytest.mark.parametrize("name", PLAN["cases"])
def test_bytes_are_the_formulas(name):
    config = build_config({**PLAN["common"], **PLAN["cases"][name]}, options=strategy_options)
    sent = sum(sent_by_axis(draft_plan(config, CPU_MACHINE, 2, 2)).values())
    for found in RECORD["runs"][name].values():
        assert found["sent_bytes_a_step"] == sent
        assert len(found["losses"]) == PLAN["steps"] // 8
