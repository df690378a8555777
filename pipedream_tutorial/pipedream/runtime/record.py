"""The record of a start of the runtime, and its table: measured against predicted."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from pipedream.runtime.prediction import (
    Case,
    MeasuredRun,
    calibrate,
    can_predict,
    durations_ns,
    makespan_ns,
    predict,
    received_before_sent,
    utilisation,
)
from pipedream.schedules.catalogue import FOUND
from pipedream.schedules.ops import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT
from pipedream.schedules.policies import weight_use
from pipedream.simulate.measures import idle
from pipedream.simulate.simulator import Costs
from pipedream.simulate.trace import trace_document

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
                       num_batches, calibrated_on (whether it is that run), measured and predicted;
                       of a found order also `found`: by rank, the letters F, I, W of a batch

    measured: makespan_ms, utilisation, bubble (1 - utilisation), repeat_makespans_ms,
    forward_ms and backward_ms (medians; B, or I + W), peak_versions, peak_memory_mib (null on a
    CPU), waited_for_host (share of the operations that a GPU had done as soon as the host had
    handed them over; null on a CPU), received_before_sent, losses (a batch; null: not finite),
    weights_equal (null: not checked).
    predicted: makespan_ms, utilisation, bubble, peak_versions; null where durations of the
    calibration say nothing about the schedule (see can_predict).
    """
    first = calibrated_on.case
    costs = calibrate(calibrated_on.events, first.schedule)
    backward = [a + b for a, b in zip(costs.input_gradient, costs.weight_gradient, strict=True)]
    cases = []
    for run in runs:
        name = run.case.name
        m = run.case.num_microbatches
        schedule = run.case.schedule
        case = {
            "schedule": name,
            "num_microbatches": m,
            "num_batches": run.case.num_batches,
            "calibrated_on": run is calibrated_on,
        }
        if name.startswith(FOUND):
            case["found"] = [
                "".join(op.kind for item in order[: 3 * m] for op in item.parts)
                for order in schedule.orders
            ]
        case["measured"] = _measured(run)
        case["predicted"] = None
        if can_predict(first.schedule, schedule):
            case["predicted"] = _predicted(run.case, costs)
        cases.append(case)
    return {
        "format": RECORD_FORMAT,
        **about,
        "num_stages": first.schedule.num_ranks,
        "calibration": {
            "schedule": first.name,
            "num_microbatches": first.num_microbatches,
            "forward_ms": [_ms(t) for t in costs.forward],
            "backward_ms": [_ms(t) for t in backward],
            "communication_ms": _ms(costs.communication),
        },
        "cases": cases,
    }


def write_whole(name: str, record: Mapping[str, Any]) -> None:
    """Replace the file at once: whenever the run ends, a whole record is there. What a link names
    is replaced, not the link, and what is no file (/dev/stdout) is written to."""
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    path = Path(name)
    if path.exists() and not path.is_file():
        path.write_text(text)
        return
    path = path.resolve()
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text)
    beside.replace(path)


def write_trace(path: str, run: MeasuredRun, calibrated_on: MeasuredRun) -> None:
    """The run's timeline, and the predicted one where there is one, for ui.perfetto.dev."""
    first = calibrated_on.case.schedule
    timeline = None
    if can_predict(first, run.case.schedule):
        timeline = predict(run.case.schedule, calibrate(calibrated_on.events, first))
    trace = trace_document(
        predicted=timeline,
        measured=run.events,
        policy=run.case.policy,
        batch_size=run.case.num_microbatches,
        unit_s=1e-9,
    )
    Path(path).write_text(json.dumps(trace))


def _measured(run: MeasuredRun) -> dict[str, Any]:
    stages = range(len(run.case.schedule.chains[0]))
    used = utilisation(run.events, run.case.schedule.num_ranks)
    medians = {key: median(ns) for key, ns in durations_ns(run.events).items()}

    def per_stage(*kinds: str) -> list[float]:
        return [_ms(sum(medians.get((stage, kind), 0) for kind in kinds)) for stage in stages]

    memory = run.peak_memory_bytes
    waited = run.waited_for_host
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


def _predicted(case: Case, costs: Costs) -> dict[str, Any]:
    timeline = predict(case.schedule, costs)
    bubble = float(idle(timeline).makespan_fraction)
    uses = weight_use(case.schedule, case.policy, case.num_microbatches)
    return {
        "makespan_ms": _ms(timeline.makespan),
        "utilisation": round(1 - bubble, 5),
        "bubble": round(bubble, 5),
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
        _name(case)
        for case in record["cases"]
        if max(case["measured"].get("waited_for_host") or [0]) > HOST_SHARE
    ]


def _name(case: Mapping[str, Any]) -> str:
    return f"{case['schedule']} m={case['num_microbatches']}"


CPU_GOAL_PERCENT = 10.0
GPU_GOAL_POINTS = 3.0


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
    if on_gpu(record):
        return f"{GPU_GOAL_POINTS:g} points"
    return f"{CPU_GOAL_PERCENT:g}% of the makespan"


def outside_goal(record: Mapping[str, Any]) -> list[str]:
    """The record's runs that were predicted worse than that."""
    goal = CPU_GOAL_PERCENT
    error = makespan_error
    unit = "%"
    if on_gpu(record):
        goal = GPU_GOAL_POINTS
        error = points_error
        unit = " points"
    return [
        f"{_name(case)} ({error(case):+.1f}{unit})"
        for case in record["cases"]
        if case["predicted"] and not case["calibrated_on"] and abs(error(case)) > goal
    ]


def render(record: Mapping[str, Any]) -> str:
    """The table of a record: measured against predicted, one line a run."""
    found = record["calibration"]
    lines = [
        "",
        f"{'schedule':20}{'m':>4}  {'makespan, ms':^24}  {'bubble, %':^26}  versions  weights",
        f"{'':24}  {'measured':>8} {'simulated':>9} {'%':>5}  "
        f"{'measured':>8} {'simulated':>9} {'points':>7}",
    ]
    lines += [_line(case) for case in record["cases"]]
    times = zip(found["forward_ms"], found["backward_ms"], strict=True)
    average = "; ".join(f"stage {stage}: {f:.2f} + {b:.2f}" for stage, (f, b) in enumerate(times))
    impossible = sum(case["measured"]["received_before_sent"] for case in record["cases"])
    lines += [
        "",
        f"* the run that the durations are from ({found['schedule']}, "
        f"m={found['num_microbatches']}): forward + backward in ms, {average}; from stage to stage "
        f"{found['communication_ms']:.2f} ms",
        "bubble: the share of all stages' time that is idle; utilisation is the rest",
        f"results received before they were sent: {impossible}",
    ]
    outside = outside_goal(record)
    if outside:
        lines.append(
            f"predicted worse than the goal of {goal_of(record)}: {', '.join(outside)}; what else "
            "runs on this machine lengthens single operations, so try again on a quiet one"
        )
    memory = {_name(case): case["measured"]["peak_memory_mib"] for case in record["cases"]}
    if any(memory.values()):
        lines.append("peak memory by stage, MiB")
        for name, peaks in memory.items():
            lines.append(f"  {name}: {', '.join(f'{mib:.0f}' for mib in peaks)}")
    late = waited_for_host(record)
    if late:
        lines.append(
            f"the GPU waited for the host to start its work in {', '.join(late)}: what is called "
            "computing there is partly launching; set a larger microbatch_size"
        )
    return "\n".join(lines)


def _line(case: Mapping[str, Any]) -> str:
    measured = case["measured"]
    predicted = case["predicted"]
    name = case["schedule"] + "*" * case["calibrated_on"]
    line = f"{name:20}{case['num_microbatches']:4d}  {measured['makespan_ms']:8.1f} "
    if predicted is None:
        line += f"{'-':>9} {'-':>5}  {100 * measured['bubble']:8.2f} {'-':>9} {'-':>7}"
    else:
        error = makespan_error(case)
        points = 100 * (predicted["bubble"] - measured["bubble"])
        line += (
            f"{predicted['makespan_ms']:9.1f} {error:+5.1f}  "
            f"{100 * measured['bubble']:8.2f} {100 * predicted['bubble']:9.2f} {points:+7.2f}"
        )
    kept = measured["peak_versions"]
    versions = ",".join(map(str, kept))
    if len(kept) > 4 and len(set(kept)) == 1:
        versions = f"{kept[0]} each"
    equal = {None: "not checked", True: "equal", False: "DIFFER"}[measured["weights_equal"]]
    return f"{line}  {versions:8}  {equal}"
