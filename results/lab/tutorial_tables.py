"""Tables of the smaller records: stashing, cut backward passes, zero bubble. Imports no torch."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

import tutorial_checkout  # noqa: F401
from pipedream.schedules.catalogue import SCHEDULES, title_of

Record = Mapping[str, Any]


def wrapped(text: str) -> str:
    """Lines of 100 columns."""
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def study_intro(study: Record) -> list[str]:
    """Where the record is from, and what the first table shows."""
    settings = study["settings"]["gradient_errors"]
    stashed = [
        row["median_relative_error"]
        for row in study["gradient_errors"]
        if row["mode"] == "pipedream"
    ]
    return [
        wrapped(
            "Made by `python results/lab/tutorial_staleness.py` in "
            f"{study['cpu_seconds']:.0f} s of CPU time. A residual network is trained under each "
            f"order with SGD, in {study['dtype']}."
        ),
        wrapped(
            "How far a microbatch's gradient is from autograd's, at the weights that its forward "
            "passes used (*own*) and at those that it is applied to (*newest*): median over "
            f"microbatches and {len(settings['seeds'])} seeds, m = {settings['num_microbatches']}. "
            f"With stashing, *own* is {_share(max(stashed))}. Columns are learning rates."
        ),
    ]


LOSS_INTRO = (
    "Where training ends: mean loss of the last pass over the data, median over 5 seeds. The "
    "learning rate is a batch's; a microbatch's update takes 1/m of it."
)

ERRORS = (
    ("stashing, newest", "pipedream", "median_staleness_error"),
    ("no stashing, own", "pipedream-no-stash", "median_relative_error"),
)


def gradient_table(study: Record) -> str:
    """A line for each depth and kind of error, a column for each learning rate."""
    rows = {
        (row["num_stages"], row["learning_rate"], row["mode"]): row
        for row in study["gradient_errors"]
    }
    rates = sorted({rate for _, rate, _ in rows})
    lines = [
        "| stages | gradient | " + " | ".join(f"{rate:g}" for rate in rates) + " |",
        "|---:|---|" + "---:|" * len(rates),
    ]
    for p in dict.fromkeys(p for p, _, _ in rows):
        for text, mode, key in ERRORS:
            cells = " | ".join(_share(rows[p, rate, mode][key]) for rate in rates)
            lines.append(f"| {p} | {text} | {cells} |")
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
        "|---:" * (2 + len(names)) + "|",
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
    diverged = f" ({row['num_diverged']} diverged)"
    return text + diverged * (row["num_diverged"] > 0)


def bubble_table(record: Record) -> str:
    """A line for each schedule, with as many microbatches as were calibrated on."""
    lines = [f"| schedule | {_column(record)} |", "|---|---:|"]
    for case in record["cases"]:
        if case["num_microbatches"] == record["calibration"]["num_microbatches"]:
            lines.append(f"| {title_of(case['schedule'])} | {_idle(case)} |")
    return "\n".join(lines)


def _column(record: Record) -> str:
    """'4 CPU processes that sleep, 2 batches of m = 8, c = 0.042 F'."""
    found, batches = record["calibration"], record["config"]["num_batches"]
    where = record["machine"]["device"].partition(",")[0]
    ratio = found["communication_ms"] * record["num_stages"] / sum(found["forward_ms"])
    if where == "CPU":
        where += " processes" + " that sleep" * any(record["emulated_ms"].values())
    else:
        where = where.replace("NVIDIA ", "") + "s"
    size = f"{batches} batch{'es' * (batches > 1)} of m = {found['num_microbatches']}"
    return f"{record['num_stages']} {where}, {size}, c = {ratio:.2g} F"


def _idle(case: Record) -> str:
    """'1,173 ms, 14.0% (13.3%)': makespan, idle share measured and simulated."""
    measured, simulated = (f"{100 * case[key]['bubble']:.1f}%" for key in ("measured", "predicted"))
    star = r" \*" * case["calibrated_on"]
    return f"{case['measured']['makespan_ms']:,.0f} ms, {measured} ({simulated}){star}"


WAYS = {
    "cut": "cut as above",
    "torch": "torch's `stage_backward_input` and `stage_backward_weight`",
    "twice": "autograd asked twice",
}


def cut_table(record: Record) -> str:
    """A line for each way of cutting a backward pass, B being the whole one's time."""
    lines = ["| way | I, ms | W, ms | (I + W) / B |", "|---|---:|---:|---:|"]
    for name, text in WAYS.items():
        way = record["ways"][name]
        _, i, w = way["ms"]
        lines.append(f"| {text} | {i:.0f} | {w:.0f} | {way['ratio']:.2f} |")
    return "\n".join(lines)
