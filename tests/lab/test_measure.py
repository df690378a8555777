"""Test results/lab/measure.py on a CPU, and that its published plans are accepted."""

import json

import pytest

from tests.conftest import ROOT, SMALL, assert_ok, heavy_pool

PROGRAM = ROOT / "results/lab/measure.py"
RUNS = {"dp": {}, "one block": {"layers": 1, "model": "tests/models/grouped"}}


@pytest.mark.parametrize("what", ["speed", "loss", "peak"])
def test_each_run_of_a_plan_is_measured(what, tmp_path):
    common = {**SMALL, "strategy": "dp", "num_samples": 64, "compile": False}
    common |= {"weights": "random", "tokenizer": "embedded"}
    plan = tmp_path / "tiny.json"
    plan.write_text(json.dumps({"measure": what, "steps": 4, "common": common, "runs": RUNS}))
    assert_ok(heavy_pool().script([plan, tmp_path / "out"], script=PROGRAM))
    cases = json.loads((tmp_path / "out/tiny.json").read_text())["cases"]
    for case in cases.values():
        assert isinstance(case, dict), case
        if what == "peak":  # without a GPU, only the prediction
            assert case["predicted_bytes"] > 0
        else:
            assert case["losses"][-1] < case["losses"][0] + 0.5
            assert case["ms"] > 0
    assert list(cases) == ["dp", "one block"]


@pytest.mark.parametrize("name", ["loss-chunks", "low-bits-base", "peaks-x1"])
def test_published_plans_are_accepted(name, tmp_path):
    plan = ROOT / f"results/plans/h100-{name}.json"
    assert_ok(heavy_pool().script([plan, tmp_path, "--dry-run"], script=PROGRAM))
