"""Published losses and times of smaller and fewer exchanges: tables are the runs', bytes the
formulas'."""

from __future__ import annotations

import json

import pytest

from distributed_training.advise.make import draft_plan
from distributed_training.predict.traffic import sent_by_axis
from distributed_training.settings.config import build_config
from distributed_training.settings.files import ROOT
from distributed_training.settings.strategies import strategy_options
from results.lab import exchanges, slow_links
from results.lab.exchanges import PLAN
from tests.support import CPU_MACHINE

LOSSES, TIMES = (
    json.loads((ROOT / f"results/records/{name}/gpt2-tiny.json").read_text())
    for name in ("cpu-exchanges", "cpu-slow-links")
)


def test_the_tables_are_the_runs():
    assert LOSSES["after_training"] == exchanges.summarise(LOSSES["runs"])
    assert LOSSES["cases"] == PLAN["cases"]
    assert TIMES["seconds_a_step"] == slow_links.summarise(TIMES["rates"])
    assert TIMES["cases"] == {name: PLAN["cases"][name] for name in slow_links.CASES}
    assert LOSSES["base"] == TIMES["base"] == PLAN["common"]


@pytest.mark.parametrize("name", PLAN["cases"])
def test_bytes_are_the_formulas(name):
    config = build_config({**PLAN["common"], **PLAN["cases"][name]}, options=strategy_options)
    sent = sum(sent_by_axis(draft_plan(config, CPU_MACHINE, 2, 2)).values())
    assert {found["sent_bytes_a_step"] for found in LOSSES["runs"][name].values()} == {sent}
    if name in slow_links.CASES:
        for cases in TIMES["rates"].values():  # the interface counts headers, too
            assert 1.03 < cases[name]["counted_bytes"] / sent < 1.07
