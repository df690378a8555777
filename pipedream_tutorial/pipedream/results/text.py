"""Records as text: the tables and paragraphs of TEST_RESULTS.md. Imports no torch."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from pipedream.runtime.record import (
    goal_of,
    makespan_error,
    outside_goal,
    points_error,
    render,
    waited_for_host,
)
from pipedream.schedules.catalogue import SCHEDULES

Record = Mapping[str, Any]


def describe(record: Record) -> str:
    """'4 stages, CPU, 20 + 40 ms slept, times from GPipe'."""
    device = record["machine"]["device"].partition(",")[0]
    text = f"{record['num_stages']} stages, {device}"
    slept = record["emulated_ms"]
    if slept["forward"] or slept["backward"]:
        text += f", {slept['forward']:g} + {slept['backward']:g} ms slept"
    return f"{text}, times from {SCHEDULES[record['calibration']['schedule']].title}"


def checked(record: Record) -> list[Mapping[str, Any]]:
    """The cases that the simulator predicted without having seen them."""
    return [
        case
        for case in record["cases"]
        if case["predicted"] is not None and not case["calibrated_on"]
    ]


def summary(records: Mapping[str, Record]) -> str:
    """One line a record: how far the simulator was off at most, and whether that is the goal."""
    lines = [
        "| record | runs predicted | makespan off by at most | utilisation off by at most | goal |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for name, record in records.items():
        cases = checked(record)
        if not cases:
            lines.append(f"| {describe(record)} (`{name}`) | 0 | - | - | nothing was predicted |")
            continue
        percent = max(abs(makespan_error(case)) for case in cases)
        points = max(abs(points_error(case)) for case in cases)
        met = not outside_goal(record)
        lines.append(
            f"| {describe(record)} (`{name}`) | {len(cases)} | {percent:.1f}% "
            f"| {points:.1f} points | {goal_of(record)}: {'met' if met else 'not met'} |"
        )
    return "\n".join(lines)


def render_page(records: Mapping[str, Record], study: Record) -> str:
    """The whole of TEST_RESULTS.md."""
    parts = [
        "# Measured results",
        _wrapped(
            "Made by `python -m pipedream.results --write` from the records in "
            "[records/](records/); a test fails when page and records disagree. Nothing here is "
            "typed in."
        ),
        "## Prediction against measurement",
        _wrapped(
            "One run of `pipedream_runtime.py` is measured, the simulator is given its mean times "
            "by stage and the time from stage to stage, and predicts the other runs: other numbers "
            "of microbatches, other schedules. Makespan: from the first operation's start to the "
            "last one's end. Utilisation: the share of all stages' time in it that is computing."
        ),
        summary(records),
        "![Measured and simulated utilisation](figures/prediction.png)",
    ]
    parts += [section(name, record) for name, record in records.items()]
    parts += ["## What weight stashing is for", *study_intro(study), gradient_table(study)]
    parts += [_wrapped(_LOSS_INTRO), final_loss_table(study)]
    return "\n\n".join(parts) + "\n"


def printed(record: Record) -> str:
    """What the runtime printed of a record, as a block of a page: its table alone."""
    table = render(record).strip("\n").partition("\n\n")[0]
    return f"```text measured\n{table}\n```"


def _wrapped(text: str, begin: str = "") -> str:
    """Lines of 100 columns; `begin` stands before the first, and the others below its end."""
    return textwrap.fill(
        text,
        100,
        initial_indent=begin,
        subsequent_indent=" " * len(begin),
        break_long_words=False,
        break_on_hyphens=False,
    )


def section(name: str, record: Record) -> str:
    """One record: machine, command, what was emulated, and a line a run."""
    machine, found = record["machine"], record["calibration"]
    versions = ", ".join(f"{what} {version}" for what, version in record["versions"].items())
    gpus = f", {machine['gpus']} GPUs" if machine["gpus"] else ""
    stages = ", ".join(
        f"{forward:.2f} + {backward:.2f}"
        for forward, backward in zip(found["forward_ms"], found["backward_ms"], strict=True)
    )
    config = record["config"]
    too_early = sum(case["measured"]["received_before_sent"] for case in record["cases"])
    facts = [
        f"record `records/{name}`; {machine['device']}{gpus}, {machine['cores']} cores, "
        f"{machine['system']}; {versions}",
        f"{record['cases'][0]['num_batches']} batches a run; of {config['repeats']} runs the one "
        f"with the median makespan, after {config['warmups']} more",
        f"calibrated on {SCHEDULES[found['schedule']].title} with m = "
        f"{found['num_microbatches']}; forward + backward in ms by stage: {stages}; from stage "
        f"to stage {found['communication_ms']:.2f} ms",
        f"results received before they were sent, which would be a clock that is off: {too_early}",
    ]
    equal = {case["measured"]["weights_equal"] for case in record["cases"]}
    if None not in equal:
        same = "in all runs" if equal == {True} else "not in all runs"
        facts.append(f"final weights equal bit for bit to those of one process {same}")
    late = waited_for_host(record)
    if late:
        facts.append(
            f"runs in which a GPU waited for the host to start its work: {', '.join(late)}"
        )
    lines = [
        f"### {describe(record)}",
        "",
        f"- command: `{record['command']}`",
        *(_wrapped(fact, "- ") for fact in facts),
        "",
        _wrapped(_emulation(record)),
        "",
        *_run_table(record["cases"]),
    ]
    return "\n".join(lines)


def _emulation(record: Record) -> str:
    """What the times of a record are of."""
    slept = record["emulated_ms"]
    if slept["forward"] or slept["backward"]:
        return (
            f"The device is emulated: each forward sleeps {slept['forward']:g} ms and each "
            f"backward {slept['backward']:g} ms on top of a small real computation. Processes, "
            "messages, weights and gradients are real; the length of an operation is not that of "
            "a model."
        )
    return (
        f"Trained: {record.get('workload', record['config']['model'])}; plain SGD. Nothing is "
        "emulated: the times are those of the model's own computing."
    )


def _run_table(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    memory = any(case["measured"]["peak_memory_mib"] is not None for case in cases)
    head = ["schedule", "m", "makespan, ms", "simulated", "off", "utilisation", "simulated",
            "points", "weight versions"]  # fmt: skip
    lines = [
        "| " + " | ".join([*head, *(["peak MiB"] if memory else [])]) + " |",
        "| --- |" + " ---: |" * 7 + " --- |" + " --- |" * memory,
    ]
    for case in cases:
        lines.append("| " + " | ".join(_run_cells(case, memory)) + " |")
    return [*lines, "", "\\*: the run that the simulator was calibrated on."]


def _run_cells(case: Mapping[str, Any], memory: bool) -> list[str]:
    measured, predicted = case["measured"], case["predicted"]
    simulated = ["-", "-", f"{100 * measured['utilisation']:.1f}%", "-", "-"]
    if predicted is not None:
        simulated = [
            f"{predicted['makespan_ms']:,.1f}",
            f"{makespan_error(case):+.1f}%",
            f"{100 * measured['utilisation']:.1f}%",
            f"{100 * predicted['utilisation']:.1f}%",
            f"{points_error(case):+.1f}",
        ]
    cells = [
        SCHEDULES[case["schedule"]].title + r" \*" * case["calibrated_on"],
        str(case["num_microbatches"]),
        f"{measured['makespan_ms']:,.1f}",
        *simulated,
        _versions(measured["peak_versions"]),
    ]
    if memory:
        found = measured["peak_memory_mib"]
        cells.append("-" if found is None else " ".join(f"{mib:,.0f}" for mib in found))
    return cells


def _versions(kept: Sequence[int]) -> str:
    return " ".join(map(str, kept)) if len(set(kept)) > 1 else f"{kept[0]} each"


def study_intro(study: Record) -> list[str]:
    """Where the record is from, and what the first table shows."""
    settings = study["settings"]["gradient_errors"]
    return [
        _wrapped(
            f"Record `records/cpu-staleness.json`, made by `{study['command']}` in "
            f"{study['cpu_seconds']:g} s of CPU time: {study['machine']}, Python "
            f"{study['python']}, torch {study['torch']}, {study['dtype']}, threads: "
            f"{study['threads']}. Real training of a small residual network under each order, "
            "plain SGD; nothing is emulated."
        ),
        _wrapped(
            "How far a microbatch's gradient is from autograd's through the whole model, relative, "
            f"median over microbatches and {len(settings['seeds'])} seeds (m = "
            f"{settings['num_microbatches']}, {settings['layers_per_stage']} layers a stage). At "
            "its own weights: those that its forward passes used. At the newest: those that the "
            "gradient is applied to."
        ),
    ]


_LOSS_INTRO = (
    "Where training ends: mean loss of the last pass over the data, median over seeds, and how "
    "many of them diverged. The learning rate is of a batch; an update of one microbatch is 1/m of "
    "it."
)


def gradient_table(study: Record) -> str:
    """A line for each depth and learning rate."""
    rows = {
        (row["num_stages"], row["learning_rate"], row["mode"]): row
        for row in study["gradient_errors"]
    }
    lines = [
        "| stages | learning rate | stashing: off at its own weights | no stashing: at its own | "
        "stashing: at the newest | no stashing: at the newest |",
        "| ---: " * 6 + "|",
    ]
    for p, rate, mode in rows:
        if mode != "pipedream":
            continue
        pair = [rows[p, rate, name] for name in ("pipedream", "pipedream-no-stash")]
        keys = ("median_relative_error", "median_staleness_error")
        cells = [_share(row[key]) for key in keys for row in pair]
        lines.append(f"| {p} | {rate:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _share(error: float | None) -> str:
    if error is None:
        return "infinite"
    return "exactly 0" if error == 0 else f"{100 * error:.2g}%"


def final_loss_table(study: Record) -> str:
    """A line for each depth and learning rate, a column for each schedule."""
    names = study["settings"]["final_losses"]["schedule_names"]
    rows = {
        (row["num_stages"], row["learning_rate"], row["name"]): row for row in study["final_losses"]
    }
    lines = [
        "| stages | learning rate | " + " | ".join(SCHEDULES[name].title for name in names) + " |",
        "| ---: " * (2 + len(names)) + "|",
    ]
    for p, rate in dict.fromkeys((p, rate) for p, rate, _ in rows):
        cells = [_loss(rows.get((p, rate, name))) for name in names]
        lines.append(f"| {p} | {rate:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _loss(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "not possible"
    if row["median"] is None:
        text = "no number"
    else:
        text = f"{row['median']:.3f}" if row["median"] < 100 else f"{row['median']:,.0f}"
    diverged = f" ({row['num_diverged']} of {len(row['losses'])} diverged)"
    return text + diverged * (row["num_diverged"] > 0)


def bubble_table(record: Record) -> str:
    """A line for each run of as many microbatches as were calibrated on."""
    lines = [
        "| schedule | m | makespan, ms | simulated | idle | simulated | weights of one process |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    m = record["calibration"]["num_microbatches"]
    for case in (case for case in record["cases"] if case["num_microbatches"] == m):
        measured, predicted = case["measured"], case["predicted"]
        equal = "equal" if measured["weights_equal"] else "DIFFERENT"
        lines.append(
            f"| {SCHEDULES[case['schedule']].title + ' *' * case['calibrated_on']} "
            f"| {case['num_microbatches']} | {measured['makespan_ms']:,.0f} "
            f"| {predicted['makespan_ms']:,.0f} | {100 * measured['bubble']:.1f}% "
            f"| {100 * predicted['bubble']:.1f}% | {equal} |"
        )
    return "\n".join(lines).replace(" *", r" \*")


WAYS = {
    "whole": "whole pass (B under I)",
    "cut": "cut as above",
    "torch": "torch's `stage_backward_input` and `stage_backward_weight`",
    "twice": "autograd asked twice",
}


def cut_table(record: Record) -> str:
    """A line for each way of cutting a backward pass."""
    lines = ["| way | F, ms | I, ms | W, ms | (I + W) / B |", "| --- | ---: | ---: | ---: | ---: |"]
    for name, way in record["ways"].items():
        lines.append("| ".join([f"| {WAYS[name]} ", *(f"{ms:.0f} " for ms in way["ms"]),
                                f"{way['ratio']:.2f} |"]))  # fmt: skip
    return "\n".join(lines)
