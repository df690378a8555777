"""Format the tables for the smaller records: weight stashing, split backward passes, and
zero-bubble schedules.

This module does not import torch."""

import textwrap
from collections.abc import Mapping
from typing import Any

import checkout  # noqa: F401
from pipedream.schedules.orders import SCHEDULES, SEARCH_PREFIX

Record = Mapping[str, Any]


def title_of(name: str) -> str:
    """Return the title of a schedule, or of an order from the runtime's search."""
    if name in SCHEDULES:
        return SCHEDULES[name].title
    return (
        f"Search, {name.removeprefix(SEARCH_PREFIX)} in memory"
        if name.startswith(SEARCH_PREFIX)
        else name
    )


def wrap(text: str) -> str:
    """Wrap text at 100 columns."""
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def study_intro(study: Record) -> str:
    """Return a paragraph that states how the study's runs were made and what the table of its
    losses contains."""
    stashed = [
        row["median_relative_error"]
        for row in study["gradient_errors"]
        if row["mode"] == "pipedream"
    ]
    relation = f"differs by up to {max(stashed):.2g} from" if any(stashed) else "equals"
    settings = study["settings"]["final_losses"]
    return wrap(
        "[A study](records/cpu-staleness.json) trained a residual network under each schedule in "
        f"{study['dtype']}, in {study['cpu_seconds']:.0f} s of CPU time. With stashing, each "
        f"gradient {relation} autograd's gradient at the same weights. The table gives the median "
        f"loss of 5 seeds after {settings['num_batches']} batches of "
        f"{settings['num_microbatches']} microbatches. A microbatch's update uses 1/m of the "
        "learning rate."
    )


def final_loss_table(study: Record) -> str:
    """Return a table of final losses, with one row per depth and learning rate, and one column per
    schedule. Depths below 4 are omitted."""
    names = study["settings"]["final_losses"]["schedule_names"]
    rows = {
        (row["num_stages"], row["learning_rate"], row["name"]): row for row in study["final_losses"]
    }
    lines = [
        "| stages | learning rate | " + " | ".join(SCHEDULES[name].title for name in names) + " |",
        "|---:" * (2 + len(names)) + "|",
    ]
    for p, rate in dict.fromkeys((p, rate) for p, rate, _ in rows if p >= 4):
        cells = [_loss(rows.get((p, rate, name))) for name in names]
        lines.append(f"| {p} | {rate:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _loss(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "not possible"
    if row["median"] is None:
        text = "not finite"
    else:
        text = f"{row['median']:.3f}" if row["median"] < 100 else f"{row['median']:,.0f}"
    diverged = f" ({row['num_diverged']} diverged)"
    return text + diverged * (row["num_diverged"] > 0)


TABLE_SCHEDULES = ("1f1b", "zb-h1", "zb-h2", "zb-v")


def bubble_table(record: Record) -> str:
    """Return a table with one row per schedule in TABLE_SCHEDULES. Only runs with as many
    microbatches as the calibration are included."""
    cases = {
        case["schedule"]: case
        for case in record["cases"]
        if case["num_microbatches"] == record["calibration"]["num_microbatches"]
    }
    lines = [f"| schedule | {_column(record)} |", "|---|---:|"]
    lines += [f"| {title_of(name)} | {_idle(cases[name])} |" for name in TABLE_SCHEDULES]
    return "\n".join(lines)


def _column(record: Record) -> str:
    """Return a heading such as '4 CPU processes that sleep, 2 batches of m = 8, c = 0.042 F'."""
    calibration, batches = record["calibration"], record["config"]["num_batches"]
    device = record["machine"]["device"].partition(",")[0]
    ratio = calibration["communication_ms"] * record["num_stages"] / sum(calibration["forward_ms"])
    if device == "CPU":
        device += " processes" + " that sleep" * any(record["emulated_ms"].values())
    else:
        device = device.replace("NVIDIA ", "") + "s"
    size = f"{batches} batch{'es' * (batches > 1)} of m = {calibration['num_microbatches']}"
    return f"{record['num_stages']} {device}, {size}, c = {ratio:.2g} F"


def _idle(case: Record) -> str:
    """Return a cell such as '1,173 ms, 14.0% (13.3%)': the makespan, the measured idle share and,
    in parentheses, the simulated idle share."""
    measured, simulated = (f"{100 * case[key]['bubble']:.1f}%" for key in ("measured", "predicted"))
    marker = r" \*" * case["calibrated_on"]
    return f"{case['measured']['makespan_ms']:,.0f} ms, {measured} ({simulated}){marker}"


METHODS = {
    "cut": "split as above",
    "torch": "torch's `stage_backward_input` and `stage_backward_weight`",
    "twice": "autograd called twice",
}


def cut_table(record: Record) -> str:
    """Return a table with one row per method of splitting a backward pass. B is the time of the
    whole pass."""
    lines = ["| method | I, ms | W, ms | (I + W) / B |", "|---|---:|---:|---:|"]
    for name, text in METHODS.items():
        method = record["ways"][name]
        _, i, w = method["ms"]
        lines.append(f"| {text} | {i:.0f} | {w:.0f} | {method['ratio']:.2f} |")
    return "\n".join(lines)
