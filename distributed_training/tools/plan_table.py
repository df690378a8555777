"""Format the table of `plan` and the sentences below it. This module does not import torch."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from distributed_training.data.report import Amount
from distributed_training.planner.rank import layout_name
from distributed_training.predict.predict import Cluster, Prediction
from distributed_training.records.display import bottleneck_name, fold, format_count, verdict
from distributed_training.records.results import format_table
from distributed_training.settings.machine import GIB


def recommended_layouts(choices: Sequence[Prediction]) -> list[tuple[str, Prediction]]:
    """Return the first choice and the fastest layout of a ranking, each with its label."""
    first = choices[0]
    fastest = min(choices, key=lambda choice: choice.sort_key)
    if first is fastest:
        return [("first, fastest", first)]
    return [("first", first), ("fastest", fastest)]


def table(choices: Sequence[Prediction], labels: Mapping[int, str]) -> str:
    """Return a table with one row per layout. `labels` maps the id of a choice to its text in the
    column "pick"."""
    rows = [_row(choice, labels.get(id(choice), "")) for choice in choices]
    return format_table({name: [row[name] for row in rows] for name in rows[0]})


def _row(choice: Prediction, label: str) -> dict[str, str]:
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
    fit_note = "" if choice.memory_fit == "yes" else f"{choice.memory_fit} "
    needed_text = format_count(choice.memory.needed_bytes / GIB)
    return {
        "pick": label, "layout": _layout_and_mode(choice), "GiB": f"{fit_note}{needed_text}",
        **speed,
    }  # fmt: skip


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
GiB: allocated memory and CUDA context of the fullest process; tight, unlikely: may not fit
MFU: share of the peak FLOP/s; error: measured times relative to predictions
not validated: never measured. {source}"""


def verdict_of(choice: Prediction, amount: Amount | str, price: str | None) -> str:
    """Return the verdict on a layout, as in a run's header."""
    plan = choice.plan
    layout = _layout_and_mode(choice)
    prediction = choice.as_record()
    return verdict(amount, asdict(plan.machine), plan.num_processes, layout, prediction, price)


def describe_picks(picks: Sequence[tuple[str, Prediction]], amount: Amount | str) -> list[str]:
    """Return lines on the amount of work, if it is unknown, on the batch, on the uncertainty of the
    first choice, and on the fastest layout."""
    first = picks[0][1]
    fastest = picks[-1][1]
    plan = first.plan
    lines = [f"{amount}."] if isinstance(amount, str) else []
    work = "steps" if isinstance(amount, str) else amount.total
    size = f"{plan.batch.global_batch_size} x {plan.config.max_length:,} tokens"
    lora = " (LoRA)" if plan.config.lora_rank else ""
    text = f"{plan.config.model}{lora} trains on {work} of {size}"
    if first.step is None or fastest.step is None or first.likely_s is None:
        return [*lines, f"{text}."]
    low, high = first.likely_s
    text += f", {first.step.seconds:.3g} s each (typically {low:.3g} to {high:.3g} s"
    text += ")" if first.validated else "; never measured)"
    if plan.machine.num_gpus and not isinstance(amount, str):
        hours = amount.num_steps * first.step.seconds * plan.num_processes / 3600
        text += f", {hours:,.3g} GPU-hours"
    lines.append(f"{text}.")
    if fastest is not first:
        gain = first.step.seconds / fastest.step.seconds - 1
        lines.append(f"The fastest layout is {_layout_and_mode(fastest)}, by {gain:.0%}.")
    return lines


def print_folded(lines: Sequence[str]) -> None:
    """Print lines, wrapped to the width of a terminal."""
    for line in lines:
        print(fold(line))
