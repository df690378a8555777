"""Answer whether a run fits and how fast it is, without training. This module does not import
torch."""

import argparse
import json
import re
import secrets
import shlex
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from distributed_training.plan.layout import Amount
from distributed_training.plan.plan import Draft
from distributed_training.planner.answer import (
    VERSION,
    Answer,
    Price,
    answer,
    count_typed_steps,
    describe_layout,
    name_with_mode,
)
from distributed_training.planner.checks import check_memory
from distributed_training.planner.layouts import format_settings
from distributed_training.planner.sort import (
    MIN_CONTEXT,
    describe_suggestion,
    find_largest,
    sort_by_speed,
)
from distributed_training.predict.predict import Cluster, Prediction, parse_cluster
from distributed_training.records.display import (
    bottleneck_name,
    describe_time,
    describe_work,
    fold,
    format_count,
)
from distributed_training.settings.config import AUTO, Request
from distributed_training.settings.errors import UserError, printable
from distributed_training.settings.files import (
    IS_INSTALLED,
    JsonObject,
    check_replaced,
    shown,
    write_own,
)
from distributed_training.settings.machine import GIB
from distributed_training.tools.jobs import FIRST_HOST_NOTE, build_batch_script, launch_command

PRICE = re.compile(r"([^\d.-]*)(\d*\.?\d+)(\D*)")  # text, number, text
MAX_SHOWN = 10  # number of layouts that --explain lists
UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `plan` that are not CONFIG keys."""
    add = parser.add_argument
    add("--write", metavar="job.slurm", help="write a SLURM job")
    add(
        "--tokens",
        metavar="N",
        help="also print how long training on N tokens takes. N can be written as 300M or 1B",
    )
    price_help = "also print the cost at this price per GPU-hour, such as 2.5 or '2.5 USD'"
    add("--price", type=parse_price, metavar="P", help=price_help)
    add("--json", action="store_true", help="print all layouts as JSON")
    for_help = (
        "answer what trainer (of transformers), trl, axolotl or llamafactory needs; FILE: its YAML"
    )
    add("--for", dest="trainer", nargs="+", metavar=("TRAINER", "FILE.yaml"), help=for_help)
    add("--python", metavar="FILE", help="with --for: Python of the environment to train in")


def run(
    arguments: argparse.Namespace, configure: Callable[[dict[str, str]], Request], script: Path
) -> int:
    """Answer the request and print the answer. `configure` applies options to CONFIG.
    Return the exit code."""
    job_file = Path(arguments.write).expanduser() if arguments.write else None
    if job_file is not None:
        if IS_INSTALLED:
            what = "--write needs a checkout, whose setup a job uses"
            raise UserError(what, fix="clone the repository, and use its real_model_example.py")
        if job_file.suffix == ".yaml":
            fix = "write job.slurm, or copy configs/skypilot.yaml or configs/kubeflow-trainjob.yaml"
            raise UserError("--write writes SLURM jobs", fix=fix)
        check_replaced(job_file)
    if arguments.trainer:
        from distributed_training.tools import plan_for

        return plan_for.run(arguments, configure, planned_cluster(arguments), script)
    request = configure(arguments.overrides)
    cluster = planned_cluster(arguments)
    if cluster is None:
        from distributed_training.start.local import requested_cluster

        cluster = requested_cluster(request, arguments.num_gpus or "all", times_cores=True)
    if job_file is not None and not cluster.machine.num_gpus:
        what = "--write writes a job for GPUs, but this machine has none"
        raise UserError(what, fix="add --cluster 2x8xH100-80GB, with the GPUs of the job")
    # CONFIG's strategy restricts the layouts only if it is typed or has keys of its own.
    if "strategy" not in request.typed and not request.engine_options:
        request = request.model_copy(update={"strategy": AUTO})
    num_tokens = arguments.tokens and _parse_tokens(arguments.tokens, request)
    is_open = request.model == request.weights == AUTO and request.preset is None
    if is_open and not cluster.is_local and job_file is None:
        _print_largest(request, cluster, as_json=arguments.json)
        return 0
    found = answer(
        request, cluster, num_tokens=num_tokens, price=arguments.price, count_work=_count_work
    )
    command = partial(launch_command, script=script)
    if arguments.json:
        document = found.as_dict()
        document["command"] = command(found.first.plan)
        print(json.dumps(document, indent=1))
        return 0
    if job_file is not None:
        check_memory(found.layouts[0], cluster)
    print("\n".join(map(fold, _describe(found, cluster))))
    if arguments.explain:
        _print_tables(found, cluster)
    else:
        print("To see other layouts and their bottlenecks, add --explain.")
    if not (found.first.fits or request.force):
        return 1
    print()
    if job_file is None:
        _print_commands(found, cluster, partial(command, job_id=secrets.token_hex(8)))
    else:
        _write_job(job_file, found, arguments, script)
    return 0


def _print_largest(request: Request, cluster: Cluster, *, as_json: bool) -> None:
    """Print the largest models that the cluster can train, for a request that names no model."""
    if as_json:
        print(json.dumps(list_largest(request, cluster), indent=1))
        return
    print("No model was named. These are the largest listed models that fit without offload,")
    print(f"of those with a context of at least {MIN_CONTEXT:,} tokens.")
    print("To plan one of them, add --model and the settings above it:")
    for settings, choices in find_largest(request, cluster):
        unchanged = f"lora_rank={request.lora_rank}" if request.lora_rank else "all weights"
        print(f"{format_settings(settings) or unchanged}:")
        for choice in choices:
            print(f"  {choice.plan.model.hub_id}{describe_suggestion({}, choice)}")


def list_largest(request: Request, cluster: Cluster) -> JsonObject:
    """Return the largest models that the cluster can train as JSON."""
    models = [
        {"model": choice.plan.model.hub_id, "settings": settings, **describe_layout(choice)}
        for settings, choices in find_largest(request, cluster)
        for choice in choices
    ]
    return {"version": VERSION, "models": models}


def _count_work(draft: Draft, notes: list[str]) -> Amount | str:
    """Count the steps if the user named a dataset, which may be tokenized for this purpose."""
    if draft.config.dataset == AUTO:
        return count_typed_steps(draft, notes)
    try:
        from distributed_training.planner.data import count_work
    except ModuleNotFoundError as error:
        return f"the number of steps is unknown, because counting them needs {error.name}"
    return count_work(draft, notes)


def _describe(found: Answer, cluster: Cluster) -> list[str]:
    """Return the lines of an answer."""
    lines = [found.verdict]
    if found.suggestions:
        lines.append("What fits, best first:")
        lines += [f"  {describe_suggestion(*suggestion)}" for suggestion in found.suggestions]
        if cluster.assumption and found.suggestions[-1][1].plan.strategy.offloads:
            lines.append(f"{cluster.assumption}.")
    elif not found.first.fits:
        lines.append("The planner knows no settings that fit. Use more GPUs or a smaller model.")
    lines += describe_picks(found)
    return lines + [f"note: {printable(note)}" for note in found.notes]


def _print_tables(found: Answer, cluster: Cluster) -> None:
    """Print a table of the layouts, which begins with the picks, and its legend."""
    from distributed_training.records.results import format_table

    picked = [choice for _, choice in found.picks]
    others = [("", choice) for choice in sort_by_speed(found.fitting) if choice not in picked]
    rows = [_row(choice, label) for label, choice in [*found.picks, *others][:MAX_SHOWN]]
    table = format_table({name: [row[name] for row in rows] for name in rows[0]})
    print(f"\n{table}\n")
    print("\n".join(map(fold, legend(cluster).splitlines())))


def _print_commands(found: Answer, cluster: Cluster, command: Callable[[Draft], str]) -> None:
    """Print the command that starts each of the picks."""
    if cluster.num_processes > cluster.processes_per_node:
        print(f"Choose one of these commands, and run it on every node. {FIRST_HOST_NOTE}")
    elif not cluster.is_local:
        check = "To check it here, add --dry-run and the option --cluster."
        print(f"Run this command there. {check if find_spec('numpy') else ''}".strip())
    for label, choice in found.picks:
        print(f"  # {label}\n  {command(choice.plan)}")


def _write_job(file: Path, found: Answer, arguments: argparse.Namespace, script: Path) -> None:
    """Write a job that trains with the first choice, and print the command that submits the
    job."""
    machine_options = ["--cluster", arguments.cluster] if arguments.cluster else []
    machine_options += ["--gpu", arguments.gpu] if arguments.gpu else []
    job = build_batch_script(
        found,
        file,
        script,
        machine_options=machine_options,
        plan_command=shlex.join(["python", *sys.argv]),
    )
    write_own(file, job)
    file_word = shlex.quote(str(file))
    print(f"Wrote {file_word}. Check it, then submit it:")
    print(f"  bash {file_word}")
    print(f"  sbatch {file_word}")


def parse_price(text: str) -> Price:
    """Return a price such as "2.5", "2.5 USD" or "$2.5"."""
    if match := PRICE.fullmatch(text):
        return Price(match[1], float(match[2]), match[3])
    raise argparse.ArgumentTypeError(f"{shown(text)} is not a price. Write 2.5 or '2.5 USD'")


def planned_cluster(arguments: argparse.Namespace) -> Cluster | None:
    """Return the cluster that --cluster and --gpu describe, or None without these options. Without
    --cluster, it has as many GPUs as this machine, at least one."""
    if arguments.cluster is None and arguments.gpu is None:
        return None
    text = arguments.cluster
    if text is None:
        from distributed_training.settings.detect import detect_machine

        text = str(max(1, detect_machine().num_gpus))
    cluster = parse_cluster(text, arguments.gpu)
    # A command for the cluster's nodes also names their GPUs.
    if arguments.num_gpus not in (None, "all", str(cluster.processes_per_node)):
        what = f"--num_gpus {arguments.num_gpus} does not fit --cluster {shown(text)}"
        raise UserError(what, fix="leave out --num_gpus")
    return cluster


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


def _row(choice: Prediction, label: str) -> dict[str, str]:
    """Return the row of a layout in the table, with `label` in the column "pick"."""
    speed = dict.fromkeys(("s/step", "tok/s", "MFU", "error", "bottleneck"), "-")
    if choice.step is not None:
        error = "unknown"
        if choice.evidence.shares is not None:
            error = "/".join(f"{100 * (share - 1):+.0f}%" for share in choice.evidence.shares)
        speed |= {
            "s/step": f"{choice.step.seconds:.3f}",
            "tok/s": format_count(choice.tokens_per_s or 0.0),
            "error": error,
            "bottleneck": bottleneck_name(choice.step.bound_by),
        }
    if choice.mfu is not None:
        speed["MFU"] = f"{100 * choice.mfu:.0f}%"
    fit_note = "" if choice.memory_fit == "yes" else f"{choice.memory_fit} "
    needed_text = format_count(choice.memory.needed_bytes / GIB)
    return {
        "pick": label,
        "layout": name_with_mode(choice),
        "GiB": f"{fit_note}{needed_text}",
        **speed,
    }


def legend(cluster: Cluster) -> str:
    """Return an explanation of the columns and words in the table."""
    if cluster.machine.num_gpus == 0:
        source = "Times come from a measurement of the cores, which needs torch."
    elif cluster.rates is None:
        source = "This GPU is not in the planner's table. Describe it with --gpu."
    else:
        source = "Times are estimated from datasheets."
    if cluster.assumption:
        source += f" {cluster.assumption}."
    return f"""\
first: the fastest layout, unless a simpler one takes about as long
m2, m4: micro-batches per replica; +full, +offload:9 ...: activation_checkpointing, of 9 blocks
GiB: allocated memory and CUDA context of the fullest process; tight, unlikely: may not fit
MFU: share of the peak FLOP/s; error: range of 80% of measured times, relative to predictions;
unknown: no comparable run was measured. {source}"""


def describe_picks(found: Answer) -> list[str]:
    """Return lines on the amount of work, if it is unknown, on the batch, on the uncertainty of the
    first choice, and on the fastest layout."""
    first = found.first
    fastest = found.picks[-1][1]
    plan = first.plan
    lines = []
    work = "steps"
    if isinstance(found.amount, str):
        lines.append(f"{found.amount[0].upper()}{found.amount[1:]}.")
    else:
        work = describe_work(found.amount)
    size = f"{plan.batch.global_batch_size} x {plan.config.max_length:,} tokens"
    text = f"It trains on {work} of {size}"
    if first.step is None or fastest.step is None:
        return [*lines, f"{text}."]
    text += f", {describe_time(first.as_record())}"
    if plan.machine.num_gpus and found.gpu_hours is not None:
        text += f", {found.gpu_hours:,.3g} GPU-hours"
    lines.append(f"{text}.")
    if fastest is not first:
        gain = first.step.seconds / fastest.step.seconds - 1
        lines.append(f"The fastest layout is {name_with_mode(fastest)}, by {gain:.0%}.")
    return lines
