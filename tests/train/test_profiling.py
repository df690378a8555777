"""Test which steps are traced. The first step is not traced, nor the step that captures a
graph if the run is long enough."""

from types import SimpleNamespace

import pytest
from torch.profiler import ProfilerAction

from distributed_training.settings.request import build_config
from distributed_training.train.profiling import build_profiler


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
