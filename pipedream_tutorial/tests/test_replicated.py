"""Simulate plans, and test the order and the period of replicated stages."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipedream.plan.planner import (
    full_speed_in_flight,
    plan_pipeline,
    replicated_1f1b,
    simulate_plan,
    steady_period,
)
from pipedream.schedules.orders import build_schedule
from pipedream.simulate.simulator import Costs, simulate
from test_planner import small_layers


@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("m", [1, 3, 9])
def test_one_worker_per_stage_is_plain_1f1b(p, m):
    counts = tuple(range(p, 0, -1))
    assert full_speed_in_flight([1] * p) == counts
    assert replicated_1f1b([1] * p, m, counts).orders == build_schedule("1f1b", p, m).orders


stages_and_times = st.lists(
    st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4
)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(stages_and_times)
def test_period_equals_the_period_of_the_slowest_stage(stages):
    replicas, forward, backward = zip(*stages, strict=True)
    in_flight = full_speed_in_flight(replicas)
    costs = Costs(
        forward=tuple(map(Fraction, forward)),
        input_gradient=tuple(map(Fraction, backward)),
        weight_gradient=(Fraction(0),) * len(stages),
    )
    found = simulate(replicated_1f1b(replicas, 120, in_flight), costs)
    reach = max(count * ahead for count, ahead in zip(replicas, in_flight, strict=True))
    assert steady_period(found, reach) == max(Fraction(f + b, r) for r, f, b in stages)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(layers=small_layers, workers=st.integers(1, 5), bandwidth=st.sampled_from([1, 7, 50]))
def test_with_busy_links_the_simulation_has_the_predicted_period(layers, workers, bandwidth):
    plan = plan_pipeline(layers, num_workers=workers, bandwidth=bandwidth)
    run = simulate_plan(plan, 160, busy_links=True)
    assert run.period_s == plan.period_s
    assert 0 < run.utilization <= 1
