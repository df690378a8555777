"""Test which steps are traced. The first step is not traced, nor the step that captures a
graph if the run is long enough."""

import gzip
import json
from types import SimpleNamespace

import pytest
from torch.profiler import ProfilerAction

from distributed_training.settings.request import build_config
from distributed_training.train.profiling import build_profiler
from tests.conftest import assert_ok, train
from tests.e2e.support import run_folders


@pytest.mark.parametrize(
    ("count", "graphs", "done", "num_steps", "traced"),
    [
        (3, False, 0, 100, [6, 7, 8]),
        (3, True, 0, 100, [15, 16, 17]),  # the 13th step is captured
        (3, True, 0, 16, [14, 15, 16]),
        (3, False, 40, 100, [46, 47, 48]),  # a resumed run warms up again
        (3, False, 0, 5, [3, 4, 5]),
        (20, True, 0, 16, list(range(2, 17))),
    ],
)
def test_steps_that_are_traced(count, graphs, done, num_steps, traced):
    config = build_config({"profile": count, "cuda_graphs": graphs})
    plan = SimpleNamespace(config=config, num_steps=num_steps)
    profiler = build_profiler(plan, done, 0, None)
    actions = [profiler.schedule(step - done - 1) for step in range(done + 1, num_steps + 1)]
    records = [
        action in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE) for action in actions
    ]
    assert [step for step, record in enumerate(records, done + 1) if record] == traced


@pytest.mark.processes
def test_each_rank_writes_a_trace_of_its_communication(tmp_path):
    values = {"strategy": "dp", "profile": 2, "max_steps": 5, "export": False, "generate": None}
    assert_ok(train({**values, "output_dir": tmp_path}, num_processes=2))
    (folder,) = run_folders(tmp_path)
    for rank in range(2):
        trace = json.loads(gzip.decompress((folder / f"trace-rank{rank}.json.gz").read_bytes()))
        names = {event["name"] for event in trace["traceEvents"]}
        assert {"ProfilerStep#3", "ProfilerStep#4"} < names
        assert "gloo:all_reduce" in names
