"""What pipedream_runtime.py prints of a record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipedream.prediction import goal_of, makespan_error, outside_goal, waited_for_host


def render(record: Mapping[str, Any]) -> str:
    """The table of a record: measured against predicted, one line a run."""
    found = record["calibration"]
    lines = [
        "",
        f"{'schedule':20}{'m':>4}  {'makespan, ms':^24}  {'bubble, %':^26}  versions  weights",
        f"{'':24}  {'measured':>8} {'simulated':>9} {'%':>5}  "
        f"{'measured':>8} {'simulated':>9} {'points':>7}",
    ]
    for case in record["cases"]:
        lines.append(_line(case))
    average = [
        f"stage {stage}: {forward:.2f} + {backward:.2f}"
        for stage, (forward, backward) in enumerate(
            zip(found["forward_ms"], found["backward_ms"], strict=True)
        )
    ]
    lines += [
        "",
        f"* the run that the durations are from ({found['schedule']}, "
        f"m={found['num_microbatches']}): forward + backward in ms, "
        f"{'; '.join(average)}; from stage to stage {found['communication_ms']:.2f} ms",
    ]
    impossible = sum(case["measured"]["received_before_sent"] for case in record["cases"])
    lines += [
        "bubble: the share of all stages' time that is idle; utilisation is the rest",
        f"results received before they were sent: {impossible}",
    ]
    outside = outside_goal(record)
    if outside:
        lines.append(
            f"predicted worse than the goal of {goal_of(record)}: {', '.join(outside)}; what else "
            "runs on this machine lengthens single operations, so try again on a quiet one"
        )
    memory = [
        f"{case['schedule']} m={case['num_microbatches']}: "
        + ", ".join(f"{mib:.0f}" for mib in case["measured"]["peak_memory_mib"])
        for case in record["cases"]
        if case["measured"]["peak_memory_mib"] is not None
    ]
    if memory:
        lines += ["peak memory by stage, MiB", *(f"  {text}" for text in memory)]
    late = waited_for_host(record)
    if late:
        lines.append(
            f"the GPU waited for the host to start its work in {', '.join(late)}: what is called "
            "computing there is partly launching; set a larger microbatch_size"
        )
    return "\n".join(lines)


def _line(case: Mapping[str, Any]) -> str:
    measured, predicted = case["measured"], case["predicted"]
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
    versions = ",".join(map(str, measured["peak_versions"]))
    equal = {None: "not checked", True: "equal", False: "DIFFER"}[measured["weights_equal"]]
    return f"{line}  {versions:8}  {equal}"
