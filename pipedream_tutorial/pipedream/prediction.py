"""From one measured run to the times of others: the simulator, fed with measured durations.

Imports no torch. Times of the simulator are nanoseconds here, kept as exact fractions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import isfinite
from statistics import median
from typing import Any

from pipedream.measures import idle
from pipedream.ops import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Op, Schedule
from pipedream.policies import Policy, weight_use
from pipedream.simulator import Costs, Timeline, simulate
from pipedream.trace import MeasuredEvent, transfers


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRun:
    """One schedule, run for real. Of several repeats: the one whose makespan is the median."""

    name: str
    """Key of SCHEDULES."""
    schedule: Schedule
    """Orders over all batches."""
    policy: Policy
    num_microbatches: int
    """In a batch."""
    num_batches: int
    events: tuple[MeasuredEvent, ...]
    repeat_makespans_ns: tuple[int, ...]
    peak_versions: tuple[int, ...]
    """By stage: most weight versions that it kept at a time."""
    peak_memory_bytes: tuple[int, ...] | None
    """By stage, as the GPU's allocator counted them; None on a CPU."""
    losses: tuple[float, ...]
    """Mean loss of each batch."""
    waited_for_host: tuple[float, ...] | None = None
    """By stage: share of its operations that ended as soon as they were handed to the GPU, which so
    waited for the host; None on a CPU."""
    weights_equal: bool | None = None
    """Whether the final weights are those of the one-process run bit for bit; None: not checked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What the simulator says of a run that it has not seen."""

    timeline: Timeline
    makespan_ns: Fraction
    utilisation: Fraction


def compute_events(events: Sequence[MeasuredEvent]) -> dict[Op, MeasuredEvent]:
    """operation -> when it was computed."""
    return {Op(e.kind, e.stage, e.microbatch): e for e in events if e.thread == "compute"}


def makespan_ns(events: Sequence[MeasuredEvent]) -> int:
    """From the start of the first operation on any stage to the end of the last one."""
    computed = compute_events(events).values()
    return max(e.end_ns for e in computed) - min(e.start_ns for e in computed)


def utilisation(events: Sequence[MeasuredEvent], num_stages: int) -> Fraction:
    """Share of all stages' time within the makespan that is computing, 0 to 1."""
    busy = sum(e.end_ns - e.start_ns for e in compute_events(events).values())
    return Fraction(busy, num_stages * makespan_ns(events))


def durations_ns(events: Sequence[MeasuredEvent]) -> dict[tuple[int, str], list[int]]:
    """(stage, kind) -> how long each such operation took."""
    found: dict[tuple[int, str], list[int]] = {}
    for op, event in compute_events(events).items():
        found.setdefault((op.stage, op.kind), []).append(event.end_ns - event.start_ns)
    return found


def communication_ns(events: Sequence[MeasuredEvent], schedule: Schedule) -> Fraction:
    """Median time from the end of an operation to the start of the one that takes its result in,
    over those receivers that had nothing else to do: whose stage had ended its operation before by
    the time the result was made. 0 if there was none.
    """
    at = compute_events(events)
    before: dict[Op, Op | None] = {}
    for order in schedule.orders:
        previous = None
        for op in (op for item in order for op in item.parts):
            before[op], previous = previous, op
    gaps = []
    for sender, receiver in transfers(schedule):
        own = before[receiver]
        if own is None or at[own].end_ns <= at[sender].end_ns:
            gaps.append(Fraction(at[receiver].start_ns - at[sender].end_ns))
    return max(Fraction(0), median(gaps)) if gaps else Fraction(0)


def calibrate(events: Sequence[MeasuredEvent], schedule: Schedule) -> Costs:
    """Mean durations by stage and the time to send, from a measured run.

    Where the run did not cut its backward passes, all of one counts as its input gradient: such
    costs predict schedules with whole backward passes only.
    """
    found = durations_ns(events)

    def means(*kinds: str) -> tuple[Fraction, ...]:
        lists = [
            [ns for kind in kinds for ns in found.get((stage, kind), [])]
            for stage in schedule.chains[0]
        ]
        return tuple(Fraction(sum(ns), len(ns)) if ns else Fraction(0) for ns in lists)

    return Costs(
        forward=means(FORWARD),
        input_gradient=means(BACKWARD, INPUT_GRADIENT),
        weight_gradient=means(WEIGHT_GRADIENT),
        communication=communication_ns(events, schedule),
    )


def can_predict(calibrated_on: Schedule, other: Schedule) -> bool:
    """Whether durations of `calibrated_on` tell those of `other`: not if only one of them cuts its
    backward passes, for where the cut lies in a whole one has not been measured."""
    return _cuts(calibrated_on) or not _cuts(other)


def _cuts(schedule: Schedule) -> bool:
    return any(op.kind == WEIGHT_GRADIENT for op in schedule.ops())


def predict(schedule: Schedule, costs: Costs) -> Prediction:
    """Run the orders in the simulator with calibrated costs."""
    timeline = simulate(schedule, costs)
    return Prediction(
        timeline=timeline,
        makespan_ns=timeline.makespan,
        utilisation=1 - idle(timeline).makespan_fraction,
    )


def received_before_sent(events: Sequence[MeasuredEvent]) -> list[Op]:
    """Operations whose result had been received before its sending began: none, if the stages'
    clocks agree."""
    sent = {_sending(e): e.start_ns for e in events if e.thread == "send"}
    received = {_sending(e): e.end_ns for e in events if e.thread == "receive"}
    return [op for op, end in received.items() if op in sent and end < sent[op]]


def _sending(event: MeasuredEvent) -> Op:
    return Op(event.kind, event.stage, event.microbatch)


RECORD_FORMAT = 1


def build_record(
    runs: Sequence[MeasuredRun], calibrated_on: MeasuredRun, about: dict[str, Any]
) -> dict[str, Any]:
    """What a record's JSON holds, all times in milliseconds, lists by stage:

        format         RECORD_FORMAT
        ...            what `about` says: command, versions, machine, config
        num_stages
        calibration    schedule and num_microbatches of the run that the durations are from;
                       forward_ms, backward_ms; communication_ms (see communication_ns)
        cases          one a run, in the order in which they ran: schedule, num_microbatches,
                       num_batches, calibrated_on (whether it is that run), measured and predicted

    measured: makespan_ms, utilisation, bubble (1 - utilisation), repeat_makespans_ms,
    forward_ms and backward_ms (medians; B, or I + W), peak_versions, peak_memory_mib (null on a
    CPU), waited_for_host (share of the operations that a GPU had done as soon as the host had
    handed them over; null on a CPU), received_before_sent, losses (a batch; null: not finite),
    weights_equal (null: not checked).
    predicted: makespan_ms, utilisation, bubble, peak_versions; null where durations of the
    calibration say nothing about the schedule (see can_predict).
    """
    costs = calibrate(calibrated_on.events, calibrated_on.schedule)
    backward = [a + b for a, b in zip(costs.input_gradient, costs.weight_gradient, strict=True)]
    return {
        "format": RECORD_FORMAT,
        **about,
        "num_stages": calibrated_on.schedule.num_ranks,
        "calibration": {
            "schedule": calibrated_on.name,
            "num_microbatches": calibrated_on.num_microbatches,
            "forward_ms": [_ms(t) for t in costs.forward],
            "backward_ms": [_ms(t) for t in backward],
            "communication_ms": _ms(costs.communication),
        },
        "cases": [
            {
                "schedule": run.name,
                "num_microbatches": run.num_microbatches,
                "num_batches": run.num_batches,
                "calibrated_on": run is calibrated_on,
                "measured": _measured(run),
                "predicted": _predicted(run, costs)
                if can_predict(calibrated_on.schedule, run.schedule)
                else None,
            }
            for run in runs
        ],
    }


def _measured(run: MeasuredRun) -> dict[str, Any]:
    stages = range(run.schedule.num_ranks)
    used = utilisation(run.events, len(stages))
    medians = {key: median(ns) for key, ns in durations_ns(run.events).items()}

    def per_stage(*kinds: str) -> list[float]:
        return [_ms(sum(medians.get((stage, kind), 0) for kind in kinds)) for stage in stages]

    memory, waited = run.peak_memory_bytes, run.waited_for_host
    return {
        "makespan_ms": _ms(makespan_ns(run.events)),
        "utilisation": round(float(used), 5),
        "bubble": round(float(1 - used), 5),
        "repeat_makespans_ms": [_ms(t) for t in run.repeat_makespans_ns],
        "forward_ms": per_stage(FORWARD),
        "backward_ms": per_stage(BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT),
        "peak_versions": list(run.peak_versions),
        "peak_memory_mib": None if memory is None else [round(b / 2**20, 1) for b in memory],
        "received_before_sent": len(received_before_sent(run.events)),
        "waited_for_host": None if waited is None else [round(share, 4) for share in waited],
        "losses": [loss if isfinite(loss) else None for loss in run.losses],
        "weights_equal": run.weights_equal,
    }


def _predicted(run: MeasuredRun, costs: Costs) -> dict[str, Any]:
    found = predict(run.schedule, costs)
    uses = weight_use(run.schedule, run.policy, run.num_microbatches)
    return {
        "makespan_ms": _ms(found.makespan_ns),
        "utilisation": round(float(found.utilisation), 5),
        "bubble": round(float(1 - found.utilisation), 5),
        "peak_versions": [use.peak_versions for use in uses.values()],
    }


def _ms(ns: Fraction | float) -> float:
    return round(float(ns) / 1e6, 4)


HOST_SHARE = 0.2  # the first operations of a run always come as fast as the host brings them


def waited_for_host(record: Mapping[str, Any]) -> list[str]:
    """The record's runs in which more than HOST_SHARE of a stage's operations ended as soon as the
    host had handed them over: what their events bracket is launching in part. A GPU that waits
    in the middle of an operation, and catches up, is not found."""
    return [
        f"{case['schedule']} m={case['num_microbatches']}"
        for case in record["cases"]
        if max(case["measured"].get("waited_for_host") or [0]) > HOST_SHARE
    ]


CPU_GOAL_PERCENT, GPU_GOAL_POINTS = 10.0, 3.0


def on_gpu(record: Mapping[str, Any]) -> bool:
    return record["machine"]["gpus"] > 0


def makespan_error(case: Mapping[str, Any]) -> float:
    """Simulated makespan against the measured one, percent."""
    return 100 * (case["predicted"]["makespan_ms"] / case["measured"]["makespan_ms"] - 1)


def points_error(case: Mapping[str, Any]) -> float:
    """Simulated utilisation less the measured one, percentage points."""
    return 100 * (case["predicted"]["utilisation"] - case["measured"]["utilisation"])


def goal_of(record: Mapping[str, Any]) -> str:
    """How close a prediction of this record should be."""
    return (
        f"{GPU_GOAL_POINTS:g} points"
        if on_gpu(record)
        else f"{CPU_GOAL_PERCENT:g}% of the makespan"
    )


def outside_goal(record: Mapping[str, Any]) -> list[str]:
    """The record's runs that were predicted worse than that."""
    found = []
    for case in record["cases"]:
        if case["predicted"] is None or case["calibrated_on"]:
            continue
        name = f"{case['schedule']} m={case['num_microbatches']}"
        if on_gpu(record) and abs(points_error(case)) > GPU_GOAL_POINTS:
            found.append(f"{name} ({points_error(case):+.1f} points)")
        if not on_gpu(record) and abs(makespan_error(case)) > CPU_GOAL_PERCENT:
            found.append(f"{name} ({makespan_error(case):+.1f}%)")
    return found
