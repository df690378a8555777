"""Compare the planner with brute force and known answers, and test its script."""

import sys
from fractions import Fraction
from itertools import combinations, pairwise

import pipedream_planner
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipedream.errors import UserError, main_with_errors
from pipedream.plan.planner import make_plan, plan_pipeline
from pipedream.plan.profile import Layer


def layer(seconds, activation=0, weight=0):
    forward = Fraction(seconds) / 3
    return Layer(
        name="layer",
        forward_s=forward,
        backward_s=Fraction(seconds) - forward,
        activation_bytes=activation,
        weight_bytes=weight,
    )


def compositions(total, parts):
    """Return all ways to write `total` as a sum of `parts` positive integers."""
    cuts = combinations(range(1, total), parts - 1)
    return [[b - a for a, b in pairwise((0, *cut, total))] for cut in cuts]


def brute_force(layers, workers, bandwidth, factor, replication):
    """Return the shortest period over all cuts and all ways to distribute exactly `workers`
    workers, or None if no distribution exists."""
    best = None
    for stages in range(1, min(len(layers), workers) + 1):
        for sizes in compositions(len(layers), stages):
            for replicas in compositions(workers, stages):
                if not replication and max(replicas) > 1:
                    continue
                worst, first = Fraction(0), 0
                for size, m in zip(sizes, replicas, strict=True):
                    stage_layers = layers[first : first + size]
                    first += size
                    compute = sum(x.forward_s + x.backward_s for x in stage_layers)
                    weights = sum(x.weight_bytes for x in stage_layers)
                    sync = Fraction(factor * (m - 1) * weights, m) / bandwidth
                    worst = max(worst, compute / m, sync / m)
                    if first < len(layers):
                        worst = max(
                            worst, 2 * stage_layers[-1].activation_bytes / Fraction(bandwidth)
                        )
                best = worst if best is None else min(best, worst)
    return best


small_layers = st.lists(
    st.builds(
        layer,
        st.fractions(min_value=Fraction(1, 4), max_value=9, max_denominator=4),
        st.integers(0, 40),
        st.integers(0, 60),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    layers=small_layers,
    workers=st.integers(1, 5),
    bandwidth=st.sampled_from([1, 7, Fraction(50, 3)]),
    factor=st.sampled_from([0, 2, 4]),
    replication=st.booleans(),
)
def test_period_equals_brute_force(layers, workers, bandwidth, factor, replication):
    network = {"bandwidth": bandwidth, "sync_factor": factor}
    all_workers = {"num_workers": workers, "replication": replication, "use_all_workers": True}
    by_workers = [
        brute_force(layers, m, bandwidth, factor, replication) for m in range(1, workers + 1)
    ]
    if by_workers[-1] is None:
        with pytest.raises(UserError, match=f"at most {len(layers)} workers"):
            plan_pipeline(layers, **all_workers, **network)
    else:
        plan = plan_pipeline(layers, **all_workers, **network)
        assert plan.period_s == by_workers[-1]
        assert plan.num_workers == workers
        cuts = [(stage.last, stage.replicas) for stage in plan.stages]
        assert make_plan(layers, cuts, **network) == plan
        assert [s.first for s in plan.stages] == [0, *(s.last + 1 for s in plan.stages[:-1])]
    fewer = plan_pipeline(layers, num_workers=workers, replication=replication, **network)
    shortest = min(period for period in by_workers if period is not None)
    assert fewer.period_s == shortest
    assert fewer.num_workers == 1 + by_workers.index(shortest)


def test_two_stages_without_replication_have_the_known_partition():
    layers = [layer(seconds) for seconds in (7, 2, 5, 10, 8)]
    plan = plan_pipeline(layers, num_workers=2, bandwidth=1, replication=False)
    assert plan.period_s == 18
    assert plan.noam == 2
    assert [(stage.first, stage.last) for stage in plan.stages] == [(0, 2), (3, 4)]
    assert plan.bottleneck == "compute of stage 1"


def test_layers_that_take_no_time_cannot_be_planned():
    with pytest.raises(UserError, match="no layer takes any time"):
        plan_pipeline([layer(0)], num_workers=1, bandwidth=1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--set", "profile=gtp2"], "did you mean 'gpt2'"),
        (["--set", "profile=none.json"], "give the path of a profile"),
        (["--set", "save_profile=x.json"], "set profile to gpt2"),
        (["--set", "profile=gpt2", "--set", "save_profile=no/where.json"], "no such folder"),
        (
            ["--set=replication=false", "--set=use_all_workers=true", "--set=workers=15"],
            "at most 14 workers",
        ),
    ],
)
def test_bad_values_give_one_line_that_says_what_to_type(monkeypatch, capsys, arguments, text):
    monkeypatch.setattr(sys, "argv", ["pipedream_planner.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main_with_errors(pipedream_planner.main)
    out, err = capsys.readouterr()
    assert (stopped.value.code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert text in err
