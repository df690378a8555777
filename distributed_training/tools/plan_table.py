"""The table of `plan`, and what is said below it. No torch import."""

from collections.abc import Mapping, Sequence

from tabulate import DataRow, TableFormat, tabulate

from distributed_training.planner.rank import SAFE, layout_name
from distributed_training.predict.memory import STATE
from distributed_training.predict.predict import Cluster, Prediction
from distributed_training.settings.machine import GIB
from distributed_training.tools.jobs import num_steps

_CELLS = DataRow("", " ", "")
ONE_SPACE = TableFormat(None, None, None, None, _CELLS, _CELLS, padding=0, with_header_hide=None)


def table(choices: Sequence[Prediction], labels: Mapping[int, str], *, every: bool) -> str:
    """One row per layout; with `every` its memory by component and whether it fits, too."""
    strategies = [choice.plan.strategy for choice in choices]
    away = any(each.steps_on_host or each.fetches_parameters for each in strategies)
    rows = [_row(choice, labels.get(id(choice), ""), every, away) for choice in choices]
    sides = ["left", "left", *["right"] * (len(rows[0]) - 3), "left"]
    lines = [[*rows[0]], *(row.values() for row in rows)]  # as headings they get padding
    return tabulate(lines, tablefmt=ONE_SPACE, disable_numparse=True, colalign=sides)


def _row(choice: Prediction, label: str, every: bool, away: bool) -> dict[str, str]:
    memory = choice.memory
    parts = memory.fullest
    sizes = {
        "state": sum(parts[name] for name in STATE),
        "acts": parts["activations"] + parts["logits"],
        "other": parts["copies"] + parts["buffers"] + memory.context_bytes,
    }
    if away:
        sizes |= {"RAM": memory.host_bytes, "disk": memory.disk_bytes}
    speed = dict.fromkeys(("s/step", "tok/s", "MFU", "likely", "bound by"), "-")
    if choice.step is not None:
        likely = "{:+.0f}/{:+.0f}%".format(*(100 * (share - 1) for share in choice.likely_shares))
        speed |= {
            "s/step": f"{choice.step.seconds:.3f}",
            "tok/s": count(choice.tokens_per_s or 0.0),
            "likely": likely if choice.validated else f"not validated, {likely}",
            "bound by": choice.step.bound_by,
        }
    if choice.mfu is not None:
        speed["MFU"] = f"{100 * choice.mfu:.0f}%"
    needed = count(memory.needed_bytes / GIB)
    words = {"pick": label, "layout": _named(choice)}
    if not every:
        tight = "" if choice.room == "yes" else f"{choice.room} "
        return {**words, "GiB": f"{tight}{needed}", **speed}
    gibs = {name: count(size / GIB) for name, size in sizes.items()}
    return {**words, "fits": choice.room, "GiB": needed, **gibs, **speed}


def _named(choice: Prediction) -> str:
    """The layout, and its recomputation."""
    mode = choice.plan.config.activation_checkpointing
    name = layout_name(choice.plan)
    return name if mode == "none" else f"{name} +{mode}"


def legend(
    choices: Sequence[Prediction], cluster: Cluster, gbit: float | None, *, every: bool
) -> str:
    """What the columns mean, as far as this table has them."""
    said = "first: the simplest layout as fast as the fastest, within the error of predictions; "
    said += f"safest: needs least memory within {100 * SAFE:.0f}% of the fastest. "
    said += "GiB: memory of the fullest process"
    said += " (all, state, activations, copies and buffers). " if every else ". "
    if any(choice.room == "tight" for choice in choices):
        said += "tight: fits as predicted, but similar runs have needed more than the GPU has. "
    if any(choice.room == "unlikely" for choice in choices):
        said += "unlikely: predicted to need more than the GPU has. "
    if any("+" in _named(choice) for choice in choices):
        said += "+selective, +full: with activation_checkpointing, to fit. "
    said += "likely: how much faster and slower such runs were. "
    if any(not choice.validated for choice in choices):
        said += "not validated: nobody here has measured such nodes, GPUs or models. "
    rates = cluster.rates
    if rates is None:
        said += "The table of GPUs does not have this one: --gpu describes it."
    elif rates.measured_at:
        said += f"Times use measurements of this machine from {rates.measured_at[:10]}."
    else:
        said += "Times are estimated from datasheets."
    if gbit is not None:
        said += f" Network: {gbit:g} Gbit/s per GPU (--network_gbit)."
    return said


def work_asked(label: str, choice: Prediction, price: float | None) -> str:
    """Hours, tokens and cost of the work that CONFIG asks for; "" if its length is not known."""
    steps = num_steps(choice.plan)
    if choice.step is None or steps is None:
        return ""
    plan = choice.plan
    tokens = steps * plan.batch.global_batch_size * plan.config.max_length
    seconds = steps * choice.step.seconds
    gpu_hours = seconds * plan.num_processes / 3600
    said = f"{label} ({layout_name(plan)}): {count(tokens)} tokens in {steps:,} steps take "
    said += f"{duration(seconds)} of training"
    if plan.machine.num_gpus:
        said += f", {gpu_hours:,.3g} GPU-hours"
        said += "" if price is None else f", {price * gpu_hours:,.2f} at {price:g} per GPU-hour"
    return f"{said}."


def why_first(first: Prediction, fitting: Sequence[Prediction]) -> str:
    """One sentence on the first choice, against the fastest, or the fastest of another strategy."""
    name = layout_name(first.plan)
    if first.step is None:
        return f"{name} needs least memory; how fast it is cannot be told without the GPU's rates."
    best = fitting[0]
    if best is not first and best.step is not None:
        ahead = 1 - best.step.seconds / first.step.seconds
        said = f"{name} comes first because it is simpler: {layout_name(best.plan)} is predicted "
        return f"{said}{ahead:.1%} faster, which is less than such predictions err by."
    said = f"{name} is the fastest that fits: its step of {first.step.seconds:.3f} s is mostly "
    said += first.step.bound_by
    for other in fitting:
        if other.plan.strategy.name != first.plan.strategy.name and other.step:
            times = other.step.seconds / first.step.seconds
            more = f"{times:.1f} times as long" if times > 2 else f"{times - 1:.1%} longer"
            return f"{said}; {layout_name(other.plan)} takes {more}."
    return f"{said}."


def duration(seconds: float) -> str:
    """In the largest unit of which there are two."""
    for unit, name in ((365.25 * 86400, "years"), (86400, "days"), (3600, "hours"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"


def count(number: float) -> str:
    """Three digits and a letter."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"
