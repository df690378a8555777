"""Test that trace files have the format that viewers require, and that they contain all events of
the run."""

import json
from collections import defaultdict
from fractions import Fraction
from operator import itemgetter
from typing import Any

import pytest
from measured import with_messages
from pipedream.schedules.ops import repeat
from pipedream.schedules.orders import build_schedule
from pipedream.schedules.policies import POLICIES, weight_use
from pipedream.simulate.measures import held_activations, peak_activations
from pipedream.simulate.simulator import Timeline, build_costs, simulate
from pipedream.simulate.trace import trace_document, transfers

P, M = 4, 8
KEYS = {
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "M": {"name", "pid", "tid", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
    "C": {"name", "pid", "tid", "ts", "args"},
}


def timeline_of(name: str, communication: str = "0") -> Timeline:
    schedule = build_schedule(name, P, M)
    costs = build_costs(
        schedule, forward="1/3", input_gradient=2, weight_gradient="5/7",
        communication=communication, overlap_saving="1/2",
    )  # fmt: skip
    return simulate(schedule, costs)


def written_events(run: Timeline, **more: Any) -> list[dict[str, Any]]:
    document = trace_document(run.schedule, predicted=run, batch_size=M, **more)
    return json.loads(json.dumps(document))["traceEvents"]


def ns(microseconds: float) -> int:
    """Convert microseconds with three decimals, as in the file, to whole nanoseconds."""
    return round(microseconds * 1000)


def check_format(events: list[dict[str, Any]]) -> None:
    threads = defaultdict(list)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    for event in events:
        assert KEYS[event["ph"]] <= event.keys()
        assert event["pid"] in processes
        assert event.get("ts", 0) >= 0
        if event["ph"] == "X":
            start = ns(event["ts"])
            threads[event["pid"], event["tid"]].append((start, start + ns(event["dur"])))
    assert set(threads) == named
    for slices in threads.values():
        open_ends: list[int] = []
        for start, end in sorted(slices, key=lambda s: (s[0], -s[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)


def check_arrows(events: list[dict[str, Any]], expected: set[tuple[str, str]]) -> None:
    slices = defaultdict(list)
    for e in events:
        if e["ph"] == "X" and e["cat"] == "compute":
            slices[e["pid"]].append(e)

    def enclosing(arrow_end: dict[str, Any]) -> str:
        (name,) = [
            e["name"]
            for e in slices[arrow_end["pid"]]
            if ns(e["ts"]) <= ns(arrow_end["ts"]) < ns(e["ts"]) + ns(e["dur"])
        ]
        return name

    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    finishes = {e["id"]: e for e in events if e["ph"] == "f"}
    assert len(starts) == sum(e["ph"] == "s" for e in events)
    assert len(finishes) == sum(e["ph"] == "f" for e in events)
    assert starts.keys() == finishes.keys()
    for number, start in starts.items():
        finish = finishes[number]
        assert finish["ts"] > start["ts"]
        assert finish["pid"] != start["pid"]
    joined = {(enclosing(starts[i]), enclosing(finishes[i])) for i in starts}
    assert joined == expected


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe-v"])
@pytest.mark.parametrize("communication", ["0", "7/2"])
def test_predicted_trace_matches_the_timeline(name: str, communication: str) -> None:
    """A predicted trace contains the simulated times of all operations and transfers, even if
    several transfers are in flight at the same time."""
    timeline = timeline_of(name, communication)
    unit = Fraction(21, 1000)  # makes most times whole nanoseconds
    events = written_events(timeline, policy=POLICIES["flush"], unit_s=unit)
    check_format(events)
    assert any(e["ph"] == "f" for e in events)
    names = {op: " | ".join(map(str, e.item.parts)) for e in timeline.events for op in e.item.parts}
    check_arrows(events, {(names[a], names[b]) for a, b in transfers(timeline.schedule)})
    tick = unit * 10**9
    assert {
        (e["pid"] - 1000, e["name"], ns(e["ts"]), ns(e["dur"]))
        for e in events
        if e["ph"] == "X" and e["cat"] == "compute"
    } == {
        (e.rank, names[e.item.parts[0]], e.start * tick, (e.end - e.start) * tick)
        for e in timeline.events
    }
    transfer_events = [e for e in events if e["ph"] == "X" and e["cat"] != "compute"]
    latency = timeline.costs.communication
    assert len(transfer_events) == (2 * len(transfers(timeline.schedule)) if latency else 0)
    assert {ns(e["dur"]) for e in transfer_events} == ({latency * tick} if latency else set())


@pytest.mark.parametrize("name", ["pipedream", "zb-v", "dualpipe-v"])
def test_counters_match_the_activations_in_flight(name: str) -> None:
    """At the end of each microbatch's last pass, the counter of held activations equals the number
    of microbatches in flight. A microbatch is in flight from the start of its F to the end of its
    last pass."""
    run = timeline_of(name)
    policy = POLICIES["stash" if name == "pipedream" else "flush"]
    events = [e for e in written_events(run, policy=policy) if e["ph"] == "C"]
    last = {op[1:]: end for op, (_, end) in run.times.items() if op.kind in "BW"}
    spans = [(s, i, run.times["F", s, i][0], end) for (s, i), end in last.items()]
    stages_per_rank = run.schedule.stages_per_rank
    use = weight_use(run.schedule, policy, M)
    for rank, stages in enumerate(run.schedule.stages_by_rank()):
        counters = {e["name"]: {} for e in events}
        for e in events:  # if there are several values at one time, the last one counts
            if e["pid"] == 1000 + rank:
                counters[e["name"]][e["ts"]] = e["args"]["count"]
        held, kept = counters.values()
        for moment in {end for _, _, _, end in spans}:
            has_ended = [
                end <= moment for s, _, begin, end in spans if s in stages and begin <= moment
            ]
            before = max(ts for ts in held if ts <= moment * 10**6 + 1e-3)
            assert held[before] == has_ended.count(False) / stages_per_rank
        assert max(kept.values()) == sum(use[s].peak_versions for s in stages) / stages_per_rank
        assert max(held.values()) == peak_activations(run.schedule)[rank]
    for rank, steps in enumerate(held_activations(run.schedule, run.times)):
        assert sorted(steps, key=itemgetter(0)) == steps
        assert max(count for _, count in steps) == peak_activations(run.schedule)[rank]


@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_prediction_and_measurement_are_written_to_one_file(name: str) -> None:
    schedule = build_schedule(name, P, M)
    timeline = simulate(repeat(schedule, 2), build_costs(schedule, communication=3))
    measured = with_messages(timeline, 10**6)
    policy = POLICIES["stash" if name == "1f1b" else "flush"]
    events = written_events(timeline, measured=measured, policy=policy, unit_s=0.001)
    check_format(events)
    check_arrows(events, {(str(a), str(b)) for a, b in transfers(timeline.schedule)})
    # Transfers that overlap in time have separate threads.
    assert {"send", "send 2", "receive 2"} <= {
        e["args"]["name"] for e in events if e["name"] == "thread_name"
    }
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {
        first + rank: f"{group} rank {rank}"
        for first, group in ((1000, "predicted"), (2000, "measured"))
        for rank in range(P)
    }
    zero = min(e.start_ns for e in measured)
    assert {
        (e["pid"] - 2000, ns(e["ts"]), ns(e["dur"]), e["cat"])
        for e in events
        if e["ph"] == "X" and e["pid"] >= 2000
    } == {(e.rank, e.start_ns - zero, e.end_ns - e.start_ns, e.thread) for e in measured}


def test_a_result_used_too_early_is_named_and_gets_no_arrow() -> None:
    run = timeline_of("1f1b", "1")
    measured = with_messages(run, 10**9)
    zero = min(e.start_ns for e in measured)
    moved = [
        e._replace(start_ns=zero, end_ns=zero + 10)
        if (e.item, e.thread) == (("F", 1, 0), "compute")
        else e
        for e in measured
    ]
    document = trace_document(run.schedule, measured=moved, policy=POLICIES["flush"], batch_size=M)
    assert document["otherData"] == {"results used before they were ready": {"measured": 1}}
    events = document["traceEvents"]
    sends = transfers(run.schedule)
    check_arrows(events, {(str(a), str(b)) for a, b in sends if (str(a), str(b)) != ("0F0", "1F0")})
    (noted,) = [e for e in events if "starts before the end of" in e.get("args", {})]
    assert (noted["name"], noted["args"]["starts before the end of"]) == ("1F0", "0F0")
