"""Prediction from measurement: exact on runs that the simulator made, close on those with jitter.

How well real runs are predicted depends on how busy a machine is: records of pipedream_runtime.py
hold that (TEST_RESULTS.md), and no test does.
"""

import json
from fractions import Fraction

import pytest
from measured import with_messages
from pipedream.runtime.record import Case, RankRun, build_record, communication_ns, measured_run
from pipedream.schedules.catalogue import build_schedule
from pipedream.schedules.ops import repeat
from pipedream.schedules.policies import POLICIES
from pipedream.simulate.measures import idle
from pipedream.simulate.simulator import Costs, simulate

MS = 10**6


def build_costs(forward, backward, *, weight=None, communication=0):
    """Durations by stage in whole milliseconds, as nanoseconds."""
    weight = weight or [0] * len(forward)
    return Costs(
        forward=tuple(Fraction(f * MS) for f in forward),
        input_gradient=tuple(Fraction(b * MS) for b in backward),
        weight_gradient=tuple(Fraction(w * MS) for w in weight),
        communication=Fraction(communication * MS),
    )


UNEVEN = build_costs([20, 30, 25, 10], [40, 55, 50, 30], communication=3)
SPLIT = build_costs([20, 30, 25, 10], [15, 20, 25, 10], weight=[30, 30, 20, 20], communication=3)


def pretend_measured(schedule, costs):
    """A measurement in which every operation took exactly what the simulator says."""
    timeline = simulate(schedule, costs)
    return tuple(with_messages(timeline, start_ns=7_000_000)), timeline


def as_run(name, schedule, events, m, *, policy="flush"):
    case = Case(name=name, num_microbatches=m, schedule=schedule, policy=POLICIES[policy])
    own = RankRun(events, [(0, 1)], [(i, 1.0) for i in range(m)], None, None)
    return measured_run(case, [[own]])


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "naive"])
@pytest.mark.parametrize("m", [4, 12, 17])
def test_other_schedules_and_sizes_are_predicted_exactly_when_durations_are_exact(name, m):
    calibrated_on = build_schedule("1f1b", 4, 8)
    events, _ = pretend_measured(calibrated_on, UNEVEN)
    other = repeat(build_schedule(name, 4, m), 2)
    _, truth = pretend_measured(other, UNEVEN)
    found = as_run("1f1b", calibrated_on, events, 8).predict(other)
    assert found.makespan == truth.makespan
    busy = 2 * m * sum(UNEVEN.forward + UNEVEN.input_gradient)
    assert 1 - idle(found).makespan_fraction == Fraction(busy, 4 * truth.makespan)


def test_communication_counts_only_stages_that_waited():
    schedule = build_schedule("1f1b", 3, 6)
    costs = build_costs([10, 10, 10], [20, 20, 20], communication=4)
    events, _ = pretend_measured(schedule, costs)
    assert communication_ns(events, schedule) == 4 * MS
    alone = build_schedule("1f1b", 1, 3)
    events, _ = pretend_measured(alone, build_costs([10], [20]))
    assert communication_ns(events, alone) == 0


def test_a_clock_that_is_off_shows_as_a_result_received_before_it_was_sent():
    schedule = build_schedule("1f1b", 3, 4)
    events, _ = pretend_measured(schedule, build_costs([10] * 3, [20] * 3, communication=1))
    early = [
        e._replace(start_ns=e.start_ns - 5 * MS, end_ns=e.end_ns - 5 * MS) if e.rank == 2 else e
        for e in events
    ]
    # Stage 2 is 5 ms early: what it receives was sent later. What it sends is not noticed.
    for seen, count in ((events, 0), (early, 4)):
        assert as_run("1f1b", schedule, seen, 4).measured["received_before_sent"] == count


def test_record_holds_measured_and_predicted_of_every_run():
    first, second = build_schedule("gpipe", 4, 4), build_schedule("1f1b", 4, 8)
    cut = build_schedule("zb-h1", 4, 4)
    runs = [
        as_run("gpipe", first, pretend_measured(first, UNEVEN)[0], 4),
        as_run("pipedream", second, pretend_measured(second, UNEVEN)[0], 8, policy="stash"),
        as_run("zb-h1", cut, pretend_measured(cut, SPLIT)[0], 4),
    ]
    record = json.loads(json.dumps(build_record(runs, runs[0], {"command": "x"})))
    assert record["format"] == 1
    assert record["command"] == "x"
    assert record["num_stages"] == 4
    assert record["calibration"] == {
        "schedule": "gpipe",
        "num_microbatches": 4,
        "forward_ms": [20, 30, 25, 10],
        "backward_ms": [40, 55, 50, 30],
        "communication_ms": 3,
    }
    gpipe, pipedream, zero_bubble = record["cases"]
    assert [case["calibrated_on"] for case in record["cases"]] == [True, False, False]
    # GPipe: sum F + (m - 1) max F + sum B + (m - 1) max B + 2 (p - 1) c
    assert gpipe["measured"]["makespan_ms"] == 85 + 3 * 30 + 175 + 3 * 55 + 6 * 3
    for case in (gpipe, pipedream):
        for key in ("makespan_ms", "utilisation", "bubble"):
            assert case["measured"][key] == case["predicted"][key]
        assert case["measured"]["utilisation"] + case["measured"]["bubble"] == pytest.approx(1)
    assert pipedream["predicted"]["peak_versions"] == [4, 3, 2, 1]
    assert gpipe["predicted"]["peak_versions"] == [1, 1, 1, 1]
    assert zero_bubble["predicted"] is None
    assert zero_bubble["measured"]["backward_ms"] == [45, 50, 45, 30]
