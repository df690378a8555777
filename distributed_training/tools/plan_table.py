"""Format the table of `plan` and the sentences below it. This module does not import torch."""

from collections.abc import Mapping, Sequence

from tabulate import DataRow, TableFormat, tabulate

from distributed_training.planner.rank import layout_name
from distributed_training.predict.memory import STATE
from distributed_training.predict.predict import Cluster, Prediction
from distributed_training.records.display import bottleneck_name, format_count, format_duration
from distributed_training.settings.machine import GIB
from distributed_training.tools.jobs import num_steps

_CELLS = DataRow("", " ", "")
ONE_SPACE = TableFormat(None, None, None, None, _CELLS, _CELLS, padding=0, with_header_hide=None)


def recommended_layouts(choices: Sequence[Prediction]) -> list[tuple[str, Prediction]]:
    """Return the first choice and the fastest layout of a ranking, each with its label."""
    first, fastest = choices[0], min(choices, key=lambda choice: choice.sort_key)
    if first is fastest:
        return [("first, fastest", first)]
    return [("first", first), ("fastest", fastest)]


def table(choices: Sequence[Prediction], labels: Mapping[int, str], *, all_columns: bool) -> str:
    """Return a table with one row per layout. `labels` maps the id of a choice to its text in the
    column "pick". If `all_columns` is set, additional columns show whether a layout fits and how
    much memory each component needs."""
    offloads = any(choice.plan.strategy.offloads for choice in choices)
    rows = [_row(choice, labels.get(id(choice), ""), all_columns, offloads) for choice in choices]
    sides = ["left", "left", *["right"] * (len(rows[0]) - 3), "left"]
    # The headings are a row of the table, because tabulate adds padding to its own headings.
    lines = [[*rows[0]], *(row.values() for row in rows)]
    return tabulate(lines, tablefmt=ONE_SPACE, disable_numparse=True, colalign=sides)


def _row(choice: Prediction, label: str, all_columns: bool, offloads: bool) -> dict[str, str]:
    memory = choice.memory
    fullest = memory.peak_by_component
    sizes = {
        "state": sum(fullest[name] for name in STATE),
        "acts": fullest["activations"] + fullest["logits"],
        "other": fullest["copies"] + fullest["buffers"] + memory.context_bytes,
    }
    if offloads:
        sizes |= {"RAM": memory.host_bytes, "disk": memory.disk_bytes}
    speed = dict.fromkeys(("s/step", "tok/s", "MFU", "error", "bottleneck"), "-")
    if choice.step is not None:
        likely = "{:+.0f}/{:+.0f}%".format(*(100 * (share - 1) for share in choice.likely_shares))
        speed |= {
            "s/step": f"{choice.step.seconds:.3f}",
            "tok/s": format_count(choice.tokens_per_s or 0.0),
            "error": likely if choice.validated else f"not validated, {likely}",
            "bottleneck": bottleneck_name(choice.step.bound_by),
        }
    if choice.mfu is not None:
        speed["MFU"] = f"{100 * choice.mfu:.0f}%"
    needed_text = format_count(memory.needed_bytes / GIB)
    first_cells = {"pick": label, "layout": _layout_and_mode(choice)}
    if not all_columns:
        fit_note = "" if choice.memory_fit == "yes" else f"{choice.memory_fit} "
        return {**first_cells, "GiB": f"{fit_note}{needed_text}", **speed}
    gibs = {name: format_count(size / GIB) for name, size in sizes.items()}
    return {**first_cells, "fits": choice.memory_fit, "GiB": needed_text, **gibs, **speed}


def _layout_and_mode(choice: Prediction) -> str:
    """Return the name of the layout, followed by the mode of activation checkpointing unless the
    mode is "none"."""
    mode = choice.plan.config.activation_checkpointing
    name = layout_name(choice.plan)
    return name if mode == "none" else f"{name} +{mode}"


def legend(cluster: Cluster, gbit: float | None) -> str:
    """Return an explanation of the columns and words in the table. `gbit` is the network speed in
    Gbit/s per GPU. It is None if the layouts do not use a network."""
    rates = cluster.rates
    if rates is None:
        source = "This GPU is not in the planner's table. Describe it with --gpu."
    elif rates.measured_at:
        source = f"Times use measurements of this machine from {rates.measured_at[:10]}."
    elif cluster.machine.num_gpus == 0:
        source = "Times are rough estimates for a CPU."
    else:
        source = "Times are estimated from datasheets."
    if gbit is not None:
        source += f" The network is assumed to have {gbit:g} Gbit/s per GPU (--network_gbit)."
    if cluster.assumption:
        source += f" {cluster.assumption}."
    return f"""\
first: the simplest of the fastest layouts
m2, m4: micro-batches per replica; +full: activation_checkpointing=full
GiB: memory of the fullest process; tight, unlikely: may not fit
MFU: share of the peak FLOP/s; error: measured times relative to predictions
not validated: never measured. {source}"""


def describe_requested_work(
    label: str, choice: Prediction, price: float | None, notes: list[str]
) -> str:
    """Return a sentence that states the number of tokens, the time and the cost of the work that
    CONFIG requests. Return "" if the amount of work or the speed is unknown. `price` is the cost of
    a GPU-hour. Add notes about the dataset to `notes`."""
    steps = num_steps(choice.plan, notes)
    if choice.step is None or steps is None:
        return ""
    plan = choice.plan
    tokens = steps * plan.batch.global_batch_size * plan.config.max_length
    seconds = steps * choice.step.seconds
    gpu_hours = seconds * plan.num_processes / 3600
    text = f"{label} ({layout_name(plan)}): {format_count(tokens)} tokens in {steps:,} steps take "
    text += f"{format_duration(seconds)} of training"
    if plan.machine.num_gpus:
        text += f", {gpu_hours:,.3g} GPU-hours"
        text += (
            ""
            if price is None
            else f", and cost {price * gpu_hours:,.2f} at {price:g} per GPU-hour"
        )
    return f"{text}."
