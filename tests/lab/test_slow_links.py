"""Times over slow links: which of them are published, and that the published table is the runs'."""

from __future__ import annotations

import json

import pytest

from distributed_training.advise.make import draft_plan
from distributed_training.predict.traffic import sent_by_axis
from distributed_training.settings.config import build_config
from distributed_training.settings.files import ROOT
from distributed_training.settings.strategies import strategy_options
from results.lab.slow_links import CASES, PLAN, summarise
from tests.support import CPU_MACHINE

RECORD = json.loads((ROOT / "results/records/cpu-slow-links/gpt2-tiny.json").read_text())


def test_only_steps_that_the_link_takes_most_of_are_told():
    """8 Mbit/s are 1 MB/s."""
    full = {"round_s": [1.5, 1.25, 3.0], "counted_bytes": 1_000_000}
    busy = {"round_s": [1.5, 1.25, 3.0], "counted_bytes": 100_000}
    rows = summarise({"8": {"much": full, "little": busy}, "0.8": {"much": full, "little": busy}})
    assert rows["much"]["KiB a step"] == pytest.approx(976.5625)
    assert (rows["much"]["s at 8 Mbit/s"], rows["much"]["link's share at 8"]) == (1.25, 0.8)
    assert rows["little"]["s at 8 Mbit/s"] is rows["little"]["link's share at 8"] is None
    assert rows["little"]["link's share at 0.8"] == pytest.approx(0.8)


def test_the_table_is_the_runs():
    assert RECORD["seconds_a_step"] == summarise(RECORD["rates"])
    assert RECORD["base"] == PLAN["common"]
    assert RECORD["cases"] == {name: PLAN["cases"][name] for name in CASES}
    assert all(list(cases) == list(CASES) for cases in RECORD["rates"].values())


@pytest.mark.parametrize("name", CASES)
def test_the_interface_counts_the_formulas_bytes_and_headers(name):
    config = build_config({**PLAN["common"], **PLAN["cases"][name]}, options=strategy_options)
    sent = sum(sent_by_axis(draft_plan(config, CPU_MACHINE, 2, 2)).values())
    for cases in RECORD["rates"].values():
        assert cases[name]["formula_bytes"] == sent
        assert 1.03 < cases[name]["counted_bytes"] / sent < 1.07
