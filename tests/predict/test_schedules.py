"""What schedules ask for, against torch's classes and the tutorial's simulator."""

from __future__ import annotations

import importlib
import sys

import pytest
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from distributed_training.parallel import pipeline
from distributed_training.plan.schedules import NO_PIPELINE, SCHEDULES, divisors, schedule_of
from distributed_training.predict.orders import build_orders, simulate
from distributed_training.settings.config import PIPELINE_SCHEDULES, build_config
from distributed_training.settings.engines import ENGINES
from distributed_training.settings.files import ROOT
from tests.support import named_strategy


def test_every_schedule_of_config_has_rules_and_an_implementation():
    assert set(SCHEDULES) == set(pipeline.SCHEDULES) == set(PIPELINE_SCHEDULES)
    assert set(ENGINES["native"].schedules) == set(SCHEDULES)
    for name, schedule in SCHEDULES.items():
        assert schedule.v_shaped <= (schedule.stages_per_rank == 2), name
        one_stage_only = issubclass(pipeline.SCHEDULES[name], PipelineScheduleSingle)
        assert not (one_stage_only and schedule.stages_per_rank > 1), name
        config = build_config({"strategy": "pp", "pipeline_schedule": name})
        assert schedule_of(config, named_strategy("pp"), 2) is schedule
        assert schedule_of(config, named_strategy("pp"), 1) is NO_PIPELINE


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        # of 1 to 12 micro-batches over 4 processes
        ("1f1b", range(4, 13)),
        ("gpipe", range(1, 13)),
        ("interleaved", (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)),
        ("zb-h1", range(1, 13)),
        ("zb-v", range(1, 13)),
        ("zb-auto", range(1, 13)),
    ],
)
def test_micro_batches_that_a_schedule_takes(name, taken):
    schedule = SCHEDULES[name]
    assert [m for m in range(1, 13) if schedule.takes(4, m)] == list(taken)
    assert schedule.counts(4, 60) == [m for m in divisors(60) if schedule.takes(4, m)]


def test_divisors():
    for number in range(1, 200):
        assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]


def test_a_message_takes_its_time_between_processes_and_none_within_one():
    """Forward 1, backward 2: of one micro-batch over two stages all follows in a row."""
    seconds = {(kind, stage): took for kind, took in (("F", 1.0), ("B", 2.0)) for stage in (0, 1)}
    orders = build_orders("gpipe", 2, 1)
    assert simulate(orders, seconds, (0, 1), 0.25)[0] == 6.5
    assert simulate([orders[0][:1] + orders[1] + orders[0][1:]], seconds, (0, 0), 0.25)[0] == 6.0


@pytest.mark.parametrize("name", SCHEDULES)
def test_bubbles_are_those_of_the_tutorials_simulator(name):
    """Equal stages, backward twice as long as forward; whole rounds of micro-batches."""
    sys.path.insert(0, str(ROOT / "pipedream_tutorial"))
    try:
        simulator = importlib.import_module("pipedream.simulate.simulator")
        schedules = importlib.import_module("pipedream.schedules.catalogue")
        measures = importlib.import_module("pipedream.simulate.measures")
    finally:
        sys.path.pop(0)
    for pp, m in [(2, 4), (4, 8), (4, 16), (3, 12), (4, 2), (5, 3), (4, 4), (3, 1)]:
        bubble = SCHEDULES[name].bubble(pp, m)
        if bubble is None:
            assert name in ("zb-v", "zb-auto")
            assert m < 2 * pp - 1
            continue
        # Where all operations take equally long, a search finds nothing shorter (test_search.py).
        order = schedules.build_schedule("zb-v" if name == "zb-auto" else name, pp, m)
        timeline = simulator.simulate(order, simulator.build_costs(order))
        assert bubble == pytest.approx(float(measures.idle(timeline).makespan_fraction))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 4])
def test_micro_batches_kept_are_at_most_all_and_at_least_one(name, pp):
    kept = [SCHEDULES[name].kept(pp, m) for m in range(1, 33)]
    assert kept == sorted(kept)
    assert all(1 <= count <= m for m, count in enumerate(kept, start=1))
    grows = kept[-1] > kept[15]
    assert grows == (name == "gpipe"), "every other schedule keeps no more than the pipeline holds"
