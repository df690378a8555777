"""Test the traces of a plan's runs: timelines and the record of runs on two processes."""

import json

from distributed_training.settings.files import ROOT
from results.lab.overlap import read_trace
from results.lab.traces import without_first_step
from tests.conftest import SMALL, assert_ok, heavy_pool
from tests.lab.test_overlap import event


def step(number, span):
    return event(f"ProfilerStep#{number}", span, "user_annotation")


def test_events_before_the_second_step_are_left_out():
    events = [
        step(1, (0, 100)), event("gloo:all_gather", (10, 90)), {"ph": "M", "name": "process_name"},
        step(2, (100, 130)), event("ncclAllReduce", (110, 120)), event("gemm", (105, 115)),
        step(3, (130, 160)), event("gemm", (130, 150)),
    ]  # fmt: skip
    rank = read_trace(without_first_step({"traceEvents": events}), 0)
    assert (rank.steps, rank.window) == (2, (105, 150))
    assert rank.counts == {"all-reduce": 1}
    assert rank.exposed == [(115, 120)]


def test_runs_of_a_plan_are_traced_on_two_processes(tmp_path):
    common = {name: value for name, value in SMALL.items() if name != "generate"}
    planned = {"small buckets": {"strategy": "dp", "bucket_cap_mb": 0.1}}
    plan = {"what": "a test", "command": "its own", "common": common, "runs": planned}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    shown = heavy_pool().script(
        [tmp_path / "plan.json", tmp_path], num_processes=2, script=ROOT / "results/lab/traces.py"
    )
    assert_ok(shown)
    run = json.loads((tmp_path / "overlap.json").read_text())["runs"]["small buckets"]
    assert [rank["rank"] for rank in run["ranks"]] == [0, 1]
    for rank in run["ranks"]:  # in the format of `overlap`
        parts = rank["traced_s"]
        assert min(parts["computing"], parts["communicating"], rank["timed_s"]) > 0
        # Collectives that are only needed for tracing are not included.
        assert list(rank["operations"]) == ["all-reduce"]
        assert rank["operations"]["all-reduce"] > 4
    assert run["timeline"]["step_us"] > 0
