"""Test that predictions from measured times are exact for simulated runs, and close if the times
have jitter.

The accuracy for real runs depends on the load on the machine, so no test checks it. TEST_RESULTS.md
shows the accuracy that pipedream_runtime.py recorded."""

import json
from fractions import Fraction

import pytest
from pipedream.runtime.record import RECORD_FORMAT, Case, MeasuredRun, Slice, build_record
from pipedream.schedules.ops import repeat, transfers
from pipedream.schedules.orders import build_schedule
from pipedream.schedules.policies import POLICIES
from pipedream.simulate.measures import idle
from pipedream.simulate.simulator import Costs, Timeline, simulate

MS = 10**6


def build_costs(forward, backward, *, weight=None, communication=0):
    """Return costs in nanoseconds. The arguments are durations by stage in whole milliseconds."""
    weight = weight or [0] * len(forward)
    return Costs(
        forward=tuple(Fraction(f * MS) for f in forward),
        input_gradient=tuple(Fraction(b * MS) for b in backward),
        weight_gradient=tuple(Fraction(w * MS) for w in weight),
        communication=Fraction(communication * MS),
    )


UNEVEN = build_costs([20, 30, 25, 10], [40, 55, 50, 30], communication=3)
SPLIT = build_costs([20, 30, 25, 10], [15, 20, 25, 10], weight=[30, 30, 20, 20], communication=3)


def with_messages(timeline: Timeline) -> list[Slice]:
    """Return the slices of all operations, and of all messages that ranks send and receive, as if
    the run had been measured. A unit of simulated time is a nanosecond."""
    schedule = timeline.schedule
    slices, ends = [], {}
    for rank, item, start, end in timeline.events:
        begun, ended = int(start), int(end)
        slices.append(Slice(rank, "compute", item, begun, ended))
        ends |= dict.fromkeys(item.parts, ended)
    ranks, delay = schedule.rank_by_op(), int(timeline.costs.communication)
    for sender, receiver in transfers(schedule):
        for thread, op in (("send", sender), ("receive", receiver)):
            sent = ends[sender]
            slices.append(Slice(ranks[op], thread, sender, sent, sent + delay))
    return slices


def simulated_run(name, p, m, costs, *, policy="flush", change=lambda s: s):
    """Return a run in which every operation took exactly its simulated time. `change` alters the
    slices."""
    schedule = build_schedule(name, p, m)
    slices = [change(s) for s in with_messages(simulate(schedule, costs))]
    case = Case(name=name, num_microbatches=m, schedule=schedule, policy=POLICIES[policy])
    constants = {"peak_versions": [(0, 1)], "losses": [(i, 1.0) for i in range(m)]}
    by_rank = [[s[1:5] for s in slices if s.rank == rank] for rank in range(p)]
    return MeasuredRun(case, [[{"slices": own, **constants}] for own in by_rank])


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "naive"])
@pytest.mark.parametrize("m", [4, 12, 17])
def test_other_schedules_and_sizes_are_predicted_exactly_when_durations_are_exact(name, m):
    other = repeat(build_schedule(name, 4, m), 2)
    truth = simulate(other, UNEVEN)
    found = simulated_run("1f1b", 4, 8, UNEVEN).predict(other)
    assert found.makespan == truth.makespan
    busy = 2 * m * sum(UNEVEN.forward + UNEVEN.input_gradient)
    assert 1 - idle(found).makespan_fraction == Fraction(busy, 4 * truth.makespan)


def test_communication_counts_only_stages_that_waited():
    costs = build_costs([10, 10, 10], [20, 20, 20], communication=4)
    assert simulated_run("1f1b", 3, 6, costs).communication_ns == 4 * MS
    assert simulated_run("1f1b", 1, 3, build_costs([10], [20])).communication_ns == 0


def test_clock_skew_is_reported_as_results_received_before_they_were_sent():
    """Stage 2's clock is 5 ms slow, so stage 2 seems to receive results before they were sent. The
    messages that stage 2 sends do not reveal the error."""

    def early(s):
        by = 5 * MS * (s.rank == 2)
        return s._replace(start_ns=s.start_ns - by, end_ns=s.end_ns - by)

    costs = build_costs([10] * 3, [20] * 3, communication=1)
    assert simulated_run("1f1b", 3, 4, costs).measured["received_before_sent"] == 0
    assert simulated_run("1f1b", 3, 4, costs, change=early).measured["received_before_sent"] == 4


def test_record_has_measured_and_predicted_values_of_every_run():
    runs = [
        simulated_run("gpipe", 4, 4, UNEVEN),
        simulated_run("pipedream", 4, 8, UNEVEN, policy="stash"),
        simulated_run("zb-h1", 4, 4, SPLIT),
    ]
    record = json.loads(json.dumps(build_record(runs, runs[0], {"command": "x"})))
    assert (record["format"], record["command"], record["num_stages"]) == (RECORD_FORMAT, "x", 4)
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
