"""Sort the layouts of all strategies by predicted step time, without training. This module does not
import torch."""

import argparse
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from distributed_training.data.report import Amount
from distributed_training.planner.checks import check_memory
from distributed_training.planner.choose import choose_model
from distributed_training.planner.data import count_work
from distributed_training.planner.sort import (
    NEAR_BEST,
    SIMPLE,
    as_typed,
    choose_batch_size,
    describe_suggestion,
    find_fastest,
    layout_name,
    sort_layouts,
    suggest,
)
from distributed_training.predict.predict import Cluster, Prediction
from distributed_training.records.display import (
    bottleneck_name,
    describe_work,
    fold,
    format_count,
    verdict,
)
from distributed_training.records.results import format_table
from distributed_training.settings.config import AUTO, Request
from distributed_training.settings.errors import UserError, printable
from distributed_training.settings.files import shown
from distributed_training.settings.machine import GIB
from distributed_training.settings.request import parse_overrides
from distributed_training.start.launch import requested_cluster
from distributed_training.tools.dry_run import FIRST_HOST_NOTE, launch_command, planned_cluster
from distributed_training.tools.jobs import build_batch_script, build_options, job_template

MAX_SHOWN = 10  # number of layouts that --explain lists
UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "b": 10**9,
    "t": 10**12,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `plan` that are not CONFIG keys."""
    add = parser.add_argument
    add(
        "--write",
        metavar="FILE",
        help="write a job: job.slurm, job.sky.yaml (SkyPilot) or job.yaml (Kubeflow TrainJob)",
    )
    add(
        "--tokens",
        metavar="N",
        help="also print how long training on N tokens takes. N can be written as 300M or 1B",
    )
    price_help = "also print the cost at this price per GPU-hour, such as 2.5 or '2.5 USD'"
    add("--price", type=parse_price, metavar="P", help=price_help)
    add("--json", action="store_true", help="print all layouts as JSON")
    add(
        "--all", action="store_true", help=f"like --explain, with all layouts, not only {MAX_SHOWN}"
    )


def run(
    arguments: argparse.Namespace, configure: Callable[[Sequence[str]], Request], script: Path
) -> int:
    """Sort the layouts and print them. `configure` applies `key=value` strings to CONFIG. Return
    the exit code."""
    job_file = Path(arguments.write).expanduser() if arguments.write else None
    if job_file is not None and job_file.exists():
        raise UserError(f"{job_file} already exists", fix="name another file, or remove this one")
    request = configure(arguments.overrides)
    cluster = _cluster(arguments, request)
    if job_file is not None and not cluster.machine.num_gpus:
        what = "--write writes a job for GPUs, but this machine has none"
        raise UserError(what, fix="add --cluster 2x8xH100-80GB, with the GPUs of the job")
    notes = list[str]()
    # CONFIG's strategy restricts the layouts only if it is typed or has keys of its own.
    if "strategy" not in parse_overrides(arguments.overrides) and not request.engine_options:
        request = request.model_copy(update={"strategy": AUTO})
    config, _ = choose_model(request, cluster.machine, notes)
    num_tokens = None if arguments.tokens is None else _parse_tokens(arguments.tokens, request)
    find_layouts = partial(
        _find_layouts, cluster=cluster, num_tokens=num_tokens, max_length=config.max_length
    )
    choices = find_layouts(request)
    if arguments.json:
        print(
            json.dumps(
                [as_dict(choice) for choice in choices],
                indent=1,
            )
        )
        return 0
    first = choices[0]
    suggestions = []
    if request.strategy == AUTO and (not first.fits or first.plan.strategy.offloads):
        suggestions = suggest(replace(first.plan, requested=request), cluster)
    if suggestions:
        settings, _ = suggestions[0]
        request = as_typed(request, **settings | {"strategy": AUTO})
        choices = find_layouts(request)
    if cluster.machine.num_gpus and request.batch_size != AUTO and not request.is_set("batch_size"):
        notes.append(_describe_larger_batch(request, cluster))
    check_memory(choices[0], cluster)
    fitting = [choice for choice in choices if choice.memory_fit in ("yes", "tight")] or choices
    picks = recommended_layouts(fitting)
    first = picks[0][1]
    amount = count_work(first.plan, notes)
    lines = [
        verdict(
            amount,
            vars(cluster.machine),
            cluster.num_processes,
            _layout_and_mode(first),
            first.as_record(),
            arguments.price,
        )
    ]
    if suggestions:
        assumption = cluster.assumption and f" {cluster.assumption}."
        lines.append(
            f"Without offload, these settings do not fit.{assumption} What fits, best first:"
        )
        lines += [f"  {describe_suggestion(*suggestion)}" for suggestion in suggestions]
    lines += describe_picks(picks, amount)
    lines += [f"note: {printable(note)}" for note in dict.fromkeys(notes)]
    if not (arguments.explain or arguments.all):
        lines.append("To see other layouts and their bottlenecks, add --explain.")
    print("\n".join(map(fold, lines)))
    if arguments.explain or arguments.all:
        max_shown = len(choices) if arguments.all else min(MAX_SHOWN, len(fitting))
        _print_table(choices, picks, max_shown)
        if max_shown < len(fitting):
            print("--all lists all layouts.")
        print("\n".join(map(fold, legend(cluster).splitlines())))
    print()
    if job_file is None:
        _print_commands(picks, cluster, arguments, script)
    else:
        _write_job(job_file, first, amount, arguments, script)
    return 0


def _find_layouts(
    request: Request, *, cluster: Cluster, num_tokens: float | None, max_length: int
) -> list[Prediction]:
    """Return the layouts, after choosing a batch size and, with --tokens, the number of steps."""
    sized = choose_batch_size(request, cluster, [])
    if num_tokens is not None:
        num_sequences = int(sized.batch_size) * sized.grad_accum_steps * cluster.num_processes
        sized = as_typed(
            sized,
            max_steps=math.ceil(num_tokens / (num_sequences * max_length)),
        )
    return sort_layouts(sized, cluster)


def _print_table(
    choices: Sequence[Prediction], picks: Sequence[tuple[str, Prediction]], max_shown: int
) -> None:
    """Print a table of the layouts, which begins with the picks."""
    picked = [choice for _, choice in picks]
    others = [("", choice) for choice in choices if choice not in picked]
    rows = [_row(choice, label) for label, choice in [*picks, *others][:max_shown]]
    table = format_table({name: [row[name] for row in rows] for name in rows[0]})
    print(f"\n{table}\n")


def _print_commands(
    picks: Sequence[tuple[str, Prediction]],
    cluster: Cluster,
    arguments: argparse.Namespace,
    script: Path,
) -> None:
    """Print the command that starts each of the picks."""
    if cluster.num_processes > cluster.processes_per_node:
        print(f"Choose one of these commands, and run it on every node. {FIRST_HOST_NOTE}")
    for label, choice in picks:
        options = build_options(choice.plan, arguments)
        print(f"  # {label}\n  {launch_command(choice.plan, os.path.relpath(script), options)}")


def _write_job(
    file: Path,
    choice: Prediction,
    amount: Amount | str,
    arguments: argparse.Namespace,
    script: Path,
) -> None:
    """Write a job that trains with a layout, and print the command that submits the job."""
    machine_options = ["--cluster", arguments.cluster] if arguments.cluster else []
    machine_options += ["--gpu", arguments.gpu] if arguments.gpu else []
    job = build_batch_script(
        choice,
        amount,
        file,
        script,
        build_options(choice.plan, arguments),
        machine_options=machine_options,
        plan_command=shlex.join(["python", *sys.argv]),
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(job, errors="surrogateescape")
    submit = job_template(file)[1]
    file_word = shlex.quote(str(file))
    print(f"Wrote {file_word}. Check it, then submit it:")
    if submit == "sbatch":
        print(f"  bash {file_word}")
    print(f"  {submit} {file_word}")


def _describe_larger_batch(request: Request, cluster: Cluster) -> str:
    """Return a note about the batch size that CONFIG sets and the size that "auto" chooses."""
    note = f"batch_size is {request.batch_size}, from CONFIG"
    best = choose_batch_size(as_typed(request, batch_size=AUTO), cluster, [])
    now = sort_layouts(request, cluster, SIMPLE)[0].tokens_per_s
    then = sort_layouts(best, cluster, SIMPLE)[0].tokens_per_s
    if now is not None and then is not None and then > now / NEAR_BEST:
        note += f"; --batch_size auto uses {best.batch_size}, "
        note += f"with {then / now:.1f} times the tokens/s"
    return note


def parse_price(text: str) -> str:
    """Return a price such as "2.5", "2.5 USD" or "$2.5" unchanged."""
    if not re.fullmatch(r"[^\d.-]*\d*\.?\d+\D*", text):
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a price. Write 2.5 or '2.5 USD'")
    return text


def _cluster(arguments: argparse.Namespace, request: Request) -> Cluster:
    """Return the cluster given by --cluster or --gpu, or this machine."""
    return planned_cluster(arguments) or requested_cluster(request, arguments.num_gpus or "all")


def _parse_tokens(text: str, request: Request) -> float:
    """Return the number of tokens that --tokens sets, such as 3e8 for "300M"."""
    match = re.fullmatch(r"(\d*\.?\d+(?:e[+-]?\d+)?)([kmbt]?)", text.lower())
    tokens = float(match[1]) * UNITS[match[2]] if match else 0.0
    if not 1 <= tokens < 1e18:
        what = f"--tokens {shown(text)} is not a number of tokens"
        raise UserError(what, fix="write 300M, 1B or 2e9")
    if request.is_set("max_steps"):
        what = "--tokens and --max_steps both set the number of steps"
        raise UserError(what, fix="leave out one")
    return tokens


def recommended_layouts(choices: Sequence[Prediction]) -> list[tuple[str, Prediction]]:
    """Return the first choice and the fastest layout of a ranking, each with its label."""
    first = choices[0]
    fastest = find_fastest(choices)
    if first is fastest:
        return [("first, fastest", first)]
    return [("first", first), ("fastest", fastest)]


def _row(choice: Prediction, label: str) -> dict[str, str]:
    """Return the row of a layout in the table, with `label` in the column "pick"."""
    speed = dict.fromkeys(("s/step", "tok/s", "MFU", "error", "bottleneck"), "-")
    if choice.step is not None:
        low, high = choice.likely_shares
        likely = f"{100 * (low - 1):+.0f}/{100 * (high - 1):+.0f}%"
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
        "pick": label,
        "layout": _layout_and_mode(choice),
        "GiB": f"{fit_note}{needed_text}",
        **speed,
    }


def _layout_and_mode(choice: Prediction) -> str:
    """Return the name of the layout, followed by the mode of activation checkpointing unless the
    mode is "none", and by the number of blocks that it applies to unless it applies to all."""
    config = choice.plan.config
    name = layout_name(choice.plan)
    if config.activation_checkpointing == "none":
        return name
    name += f" +{config.activation_checkpointing}"
    if config.checkpointed_blocks is not None:
        name += f":{config.checkpointed_blocks}"
    return name


def legend(cluster: Cluster) -> str:
    """Return an explanation of the columns and words in the table."""
    rates = cluster.rates
    if rates is None:
        source = "This GPU is not in the planner's table. Describe it with --gpu."
    elif cluster.machine.num_gpus == 0:
        source = "Times are rough estimates for a CPU."
    else:
        source = "Times are estimated from datasheets."
    if cluster.assumption:
        source += f" {cluster.assumption}."
    return f"""\
first: the fastest layout, unless a simpler one takes about as long
m2, m4: micro-batches per replica; +full, +offload:9 ...: activation_checkpointing, of 9 blocks
GiB: allocated memory and CUDA context of the fullest process; tight, unlikely: may not fit
MFU: share of the peak FLOP/s; error: measured times relative to predictions
not validated: never measured. {source}"""


def describe_picks(
    picks: Sequence[tuple[str, Prediction]],
    amount: Amount | str,
) -> list[str]:
    """Return lines on the amount of work, if it is unknown, on the batch, on the uncertainty of the
    first choice, and on the fastest layout."""
    first = picks[0][1]
    fastest = picks[-1][1]
    plan = first.plan
    lines = [f"{amount}."] if isinstance(amount, str) else []
    work = "steps" if isinstance(amount, str) else describe_work(amount)
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


def as_dict(choice: Prediction) -> dict[str, Any]:
    """Return a layout as a dictionary for --json. `memory_bytes` maps each component to a list of
    its sizes in bytes, one per rank."""
    plan = choice.plan
    stages = choice.memory.by_rank
    ranks_per_stage = plan.num_processes // len(stages)
    by_rank = {
        component: [stage[component] for stage in stages for _ in range(ranks_per_stage)]
        for component in stages[0]
    }
    return {
        "strategy": plan.strategy.name,
        "axes": plan.mesh,
        "schedule": plan.config.pipeline_schedule if plan.mesh["pp"] > 1 else None,
        "micro_batch_size": plan.batch.micro_batch_size,
        "num_microbatches": plan.batch.num_microbatches,
        "fits": choice.fits,
        "validated": choice.validated,
        "memory_bytes": by_rank,
        "step_time_s": choice.step and choice.step.seconds,
        "tokens_per_s": choice.tokens_per_s,
        "likely_s": choice.likely_s,
        "likely_bytes": choice.memory.likely_bytes,
    }
