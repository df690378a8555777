"""Test the traces of a plan's runs: timelines, the record of runs on two processes, and the
published shares of computation and communication."""

import json

import pytest

from distributed_training.settings.files import ROOT
from results.lab.overlap import read_trace
from results.lab.traces import FAILED, NUM_TIMED, summarize, timeline, without_first_step
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


def test_timeline_shows_the_first_step_in_whole_microseconds():
    """The trace has two steps of 3,000 µs. In the timeline, spans less than 1 µs apart are
    merged."""
    events = [
        step(1, (0, 1)), step(2, (1, 2)),
        event("gemm", (1_000_000.4, 1_001_000.2)), event("gemm", (1_001_001.1, 1_002_000.4)),
        event("ncclAllReduce", (1_001_500.4, 1_003_500.4)),
        event("gemm", (1_006_000.4, 1_006_000.4)),
    ]  # fmt: skip
    assert timeline(read_trace({"traceEvents": events}, 0)) == {
        "step_us": 3000,
        "computing": [[0, 2000]],
        "exposed": [[2000, 3000]],
        "by_kind": {"all-reduce": [[1500, 3000]]},
    }


def test_runs_of_a_plan_are_traced_on_two_processes(tmp_path):
    common = {name: value for name, value in SMALL.items() if name != "generate"}
    planned = {
        "dp": {"strategy": "dp"},
        "small buckets": {"strategy": "dp", "bucket_cap_mb": 0.1},
        "refused": {"strategy": "fsdp", "gradient_compression": "bf16"},
        "failed before": {"strategy": "dp"},
    }
    plan = {"what": "a test", "command": "its own", "common": common, "runs": planned}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    record = tmp_path / "overlap.json"
    before = {"failed before": {"failed": FAILED}}
    record.write_text(json.dumps({"plan": plan, "runs": before}))
    shown = heavy_pool().script(
        [tmp_path / "plan.json", tmp_path], num_processes=2, script=ROOT / "results/lab/traces.py"
    )
    assert_ok(shown)
    assert f"{record} already has: failed before" in shown.stdout
    found = json.loads(record.read_text())
    assert set(found["failed"]) == {"failed before", "refused"}
    assert "gradient_compression='bf16'" in found["failed"]["refused"]
    runs = {name: run for name, run in found["runs"].items() if "failed" not in run}
    assert list(runs) == ["dp", "small buckets"]
    for name, run in runs.items():
        assert [rank["rank"] for rank in run["ranks"]] == [0, 1]
        for rank in run["ranks"]:  # in the format of `overlap`
            parts = rank["traced_s"]
            assert min(parts["computing"], parts["communicating"], rank["timed_s"]) > 0, name
        assert run["timeline"]["step_us"] > 0
    # Collectives that are only needed for tracing are not included.
    assert runs["dp"]["ranks"][0]["operations"] == {"all-reduce": 1}
    assert runs["small buckets"]["ranks"][0]["operations"]["all-reduce"] > 4
    assert found["steps"]["timed"] == NUM_TIMED


@pytest.mark.parametrize("name", ["cpu-overlap", "h200-x4-overlap"])
def test_published_shares_match_their_runs(name):
    record = json.loads((ROOT / f"results/records/{name}/overlap.json").read_text())
    plan = json.loads((ROOT / f"results/plans/{name}.json").read_text())
    assert {**record["plan"], "command": plan["command"]} == plan  # commands change with the code
    assert record["shares"] == summarize(record["runs"])
    measured = list(record["runs"])  # the plan's first runs, until the time limit
    assert measured == list(record["plan"]["runs"])[: len(measured)]
