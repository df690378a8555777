"""The record of a start of the runtime, and its table: measured against predicted."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from pipedream.runtime.prediction import (
    Case,
    MeasuredRun,
    durations_ns,
    makespan_ns,
    predict,
    received_before_sent,
)
from pipedream.schedules.catalogue import FOUND
from pipedream.schedules.ops import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT
from pipedream.schedules.policies import weight_use
from pipedream.simulate.measures import idle
from pipedream.simulate.trace import MeasuredEvent, trace_document

RECORD_FORMAT = 1


class RankRun(NamedTuple):
    """What one rank brings home from a run: plain data, which goes as JSON."""

    events: list[MeasuredEvent]
    peak_versions: list[tuple[int, int]]
    """(stage, most weight versions that it kept at a time)"""
    losses: list[tuple[int, float]]
    """(microbatch, mean loss), on the rank with the last stage."""
    peak_memory_bytes: int | None
    """As the GPU's allocator counted them; None on a CPU."""
    waited_for_host: float | None
    """Share of the operations that the GPU had done as soon as the host had handed them over, 0 to
    1: at their end it waited for the host. None on a CPU, where to call is to compute."""


def measured_run(
    case: Case, by_rank: Sequence[Sequence[RankRun]], weights: Sequence[Any] = ()
) -> MeasuredRun:
    """Of each rank's repeats the one with the median makespan (of an even number, the faster
    middle), with all that build_record says of it."""
    repeats = list(zip(*by_rank, strict=True))
    merged = [
        [MeasuredEvent(*event) for rank in repeat for event in rank.events] for repeat in repeats
    ]
    spans = list(map(makespan_ns, merged))
    chosen = sorted(range(len(spans)), key=spans.__getitem__)[(len(spans) - 1) // 2]
    ranks = repeats[chosen]
    events = merged[chosen]
    durations = durations_ns(events)
    busy = sum(sum(ns) for ns in durations.values())
    utilisation = Fraction(busy, case.schedule.num_ranks * spans[chosen])
    stages = range(len(case.schedule.chains[0]))

    def medians(*kinds: str) -> list[float]:
        found = ([durations.get((stage, kind), [0]) for kind in kinds] for stage in stages)
        return [_ms(sum(median(ns) for ns in own)) for own in found]

    losses = [loss for _, loss in sorted(pair for rank in ranks for pair in rank.losses)]
    m = case.num_microbatches
    means = [sum(losses[first : first + m]) / m for first in range(0, len(losses), m)]
    memory = [r.peak_memory_bytes / 2**20 for r in ranks if r.peak_memory_bytes is not None]
    waited = [r.waited_for_host for r in ranks if r.waited_for_host is not None]
    measured = {
        "makespan_ms": _ms(spans[chosen]),
        "utilisation": round(float(utilisation), 5),
        "bubble": round(float(1 - utilisation), 5),
        "repeat_makespans_ms": list(map(_ms, spans)),
        "forward_ms": medians(FORWARD),
        "backward_ms": medians(BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT),
        "peak_versions": [n for _, n in sorted(pair for r in ranks for pair in r.peak_versions)],
        "peak_memory_mib": [round(mib, 1) for mib in memory] or None,
        "received_before_sent": len(received_before_sent(events)),
        "waited_for_host": [round(share, 4) for share in waited] or None,
        "losses": [loss if isfinite(loss) else None for loss in means],
        "weights_equal": None,
    }
    return MeasuredRun(case=case, events=events, measured=measured, weights=weights)


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
    forward_ms and backward_ms (medians; B, or I + W), peak_versions, peak_memory_mib and
    waited_for_host (by rank, see RankRun; null on a CPU), received_before_sent, losses (a batch;
    null: not finite), weights_equal (to one process's bit for bit; null: not checked).
    predicted: makespan_ms, utilisation, bubble, peak_versions; null where durations of the
    calibration say nothing about the schedule (see predict).
    """
    first = calibrated_on.case
    costs = calibrated_on.costs
    backward = map(sum, zip(costs.input_gradient, costs.weight_gradient, strict=True))
    return {
        "format": RECORD_FORMAT,
        **about,
        "num_stages": first.schedule.num_ranks,
        "calibration": {
            "schedule": first.name,
            "num_microbatches": first.num_microbatches,
            "forward_ms": list(map(_ms, costs.forward)),
            "backward_ms": list(map(_ms, backward)),
            "communication_ms": _ms(costs.communication),
        },
        "cases": [_case(run, calibrated_on) for run in runs],
    }


def _case(run: MeasuredRun, calibrated_on: MeasuredRun) -> dict[str, Any]:
    schedule = run.case.schedule
    m = run.case.num_microbatches
    found = {
        "schedule": run.case.name,
        "num_microbatches": m,
        "num_batches": schedule.num_microbatches // m,
        "calibrated_on": run is calibrated_on,
        "measured": run.measured,
        "predicted": None,
    }
    if run.case.name.startswith(FOUND):
        found["found"] = ["".join(op.kind for op in order[: 3 * m]) for order in schedule.flat]
    timeline = predict(schedule, calibrated_on)
    if timeline is not None:
        bubble = float(idle(timeline).makespan_fraction)
        uses = weight_use(schedule, run.case.policy, m)
        found["predicted"] = {
            "makespan_ms": _ms(timeline.makespan),
            "utilisation": round(1 - bubble, 5),
            "bubble": round(bubble, 5),
            "peak_versions": [use.peak_versions for use in uses.values()],
        }
    return found


def _ms(ns: Fraction | float) -> float:
    return round(float(ns) / 1e6, 4)


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
    trace = trace_document(
        predicted=predict(run.case.schedule, calibrated_on),
        measured=run.events,
        policy=run.case.policy,
        batch_size=run.case.num_microbatches,
        unit_s=1e-9,
    )
    Path(path).write_text(json.dumps(trace))


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


def makespan_error(case: Mapping[str, Any]) -> float:
    """Simulated makespan against the measured one, percent."""
    return 100 * (case["predicted"]["makespan_ms"] / case["measured"]["makespan_ms"] - 1)


def points_error(case: Mapping[str, Any]) -> float:
    """Simulated utilisation less the measured one, percentage points."""
    return 100 * (case["predicted"]["utilisation"] - case["measured"]["utilisation"])


class Goal(NamedTuple):
    """How close predictions of a record should be."""

    most: float
    error: Callable[[Mapping[str, Any]], float]
    unit: str
    text: str


CPU_GOAL = Goal(10, makespan_error, "%", "10% of the makespan")
GPU_GOAL = Goal(3, points_error, " points", "3 points")


def on_gpu(record: Mapping[str, Any]) -> bool:
    return record["machine"]["gpus"] > 0


def goal_of(record: Mapping[str, Any]) -> Goal:
    return GPU_GOAL if on_gpu(record) else CPU_GOAL


def outside_goal(record: Mapping[str, Any]) -> list[str]:
    """The record's runs that were predicted worse than that."""
    most, error, unit, _ = goal_of(record)
    return [
        f"{_name(case)} ({error(case):+.1f}{unit})"
        for case in record["cases"]
        if case["predicted"] and not case["calibrated_on"] and abs(error(case)) > most
    ]


def render(record: Mapping[str, Any]) -> str:
    """The table of a record: measured against predicted, one line a run."""
    found = record["calibration"]
    cases = record["cases"]
    times = zip(found["forward_ms"], found["backward_ms"], strict=True)
    average = "; ".join(f"stage {stage}: {f:.2f} + {b:.2f}" for stage, (f, b) in enumerate(times))
    lines = [
        "",
        f"{'schedule':20}{'m':>4}  {'makespan, ms':^24}  {'bubble, %':^26}  versions  weights",
        f"{'':24}  {'measured':>8} {'simulated':>9} {'%':>5}  "
        f"{'measured':>8} {'simulated':>9} {'points':>7}",
        *map(_line, cases),
        "",
        f"* the run that the durations are from ({found['schedule']}, "
        f"m={found['num_microbatches']}): forward + backward in ms, {average}; from stage to stage "
        f"{found['communication_ms']:.2f} ms",
        "bubble: the share of all stages' time that is idle; utilisation is the rest",
        "results received before they were sent: "
        f"{sum(case['measured']['received_before_sent'] for case in cases)}",
    ]
    outside = outside_goal(record)
    if outside:
        lines.append(
            f"predicted worse than the goal of {goal_of(record).text}: {', '.join(outside)}; what "
            "else runs on this machine lengthens single operations, so try again on a quiet one"
        )
    memory = {_name(case): case["measured"]["peak_memory_mib"] for case in cases}
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
    makespan, bubble = f"{'-':>9} {'-':>5}", f"{'-':>9} {'-':>7}"
    if predicted is not None:
        points = 100 * (predicted["bubble"] - measured["bubble"])
        makespan = f"{predicted['makespan_ms']:9.1f} {makespan_error(case):+5.1f}"
        bubble = f"{100 * predicted['bubble']:9.2f} {points:+7.2f}"
    kept = measured["peak_versions"]
    versions = ",".join(map(str, kept))
    if len(kept) > 4 and len(set(kept)) == 1:
        versions = f"{kept[0]} each"
    equal = {None: "not checked", True: "equal", False: "DIFFER"}[measured["weights_equal"]]
    star = "*" if case["calibrated_on"] else ""
    return (
        f"{case['schedule'] + star:20}{case['num_microbatches']:4d}  "
        f"{measured['makespan_ms']:8.1f} {makespan}  {100 * measured['bubble']:8.2f} {bubble}  "
        f"{versions:8}  {equal}"
    )
