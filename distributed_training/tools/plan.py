"""Every layout of every strategy, ranked by predicted time; nothing runs. No torch import."""

import argparse
import json
import math
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from distributed_training.models import find_model
from distributed_training.planner.checks import check_memory
from distributed_training.planner.choose import choose_model, lay_out
from distributed_training.planner.rank import choose_spread, layout_name, pick, rank_layouts
from distributed_training.predict.predict import (
    ROOMS,
    Cluster,
    Prediction,
    parse_cluster,
    this_machine,
)
from distributed_training.predict.rates import calibration_file
from distributed_training.records.display import WIDTH
from distributed_training.settings.cache import CACHE
from distributed_training.settings.config import AUTO, KEYS, Request, with_values
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import expand_home, plural, require_writable, shown
from distributed_training.settings.machine import GIB, detect_machine
from distributed_training.settings.strategies import named_strategy
from distributed_training.start.launch import launch_command, requested_processes
from distributed_training.start.ranks import run_ranks
from distributed_training.tools.jobs import batch_script, options_of
from distributed_training.tools.plan_table import legend, table, why_first, work_asked

SHOWN = 10  # layouts, without --all
MODES = ("none", "selective", "full")  # of activation_checkpointing, the fastest first
_COUNT = re.compile(r"(\d+\.?\d*|\.\d+)(?:e(\d+))?([kMBT]?)", re.IGNORECASE)
_SIZES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `plan` takes besides CONFIG's keys."""
    add = parser.add_argument
    add("--write", metavar="FILE", help="write the best layout as a SLURM job")
    add("--calibrate", action="store_true",
        help="measure this machine first, about a minute; used from then on")  # fmt: skip
    add(
        "--tokens",
        metavar="N",
        help="train on N tokens, such as 300M or 1B; says how long it takes",
    )
    add("--price", type=float, metavar="P", help="price per GPU-hour; says what the work costs")
    add("--json", action="store_true", help="all layouts, for programs")
    add("--all", action="store_true", help=f"all layouts, not the best {SHOWN}")


def run(
    arguments: argparse.Namespace, configure: Callable[[Sequence[str]], Request], script: Path
) -> int:
    """Rank and print; `configure` gives CONFIG with `key=value` texts."""
    command = shlex.join(["python", *sys.argv])
    job_file = None
    if arguments.write:
        job_file = Path(expand_home("--write", arguments.write))
        require_writable(job_file.parent, "name another file with --write", job_file.name)

    def build(strategy: str | None) -> Request:
        chosen = [] if strategy is None else [f"strategy={strategy}"]
        return configure([*arguments.overrides, *chosen])

    cluster = _cluster(arguments)
    if arguments.calibrate:
        if arguments.cluster is not None:
            raise UserError("--calibrate measures this machine", fix="leave out --cluster")
        count = cluster.num_processes
        file = calibration_file(cluster.machine.gpu_name or f"cpu-x{count}")
        require_writable(file.parent, f"set {CACHE} to another folder", file.name)
        # With all processes that are planned for; they need torch.
        if run_ranks([str(script), "calibrate", str(file)], count).exit_code != 0:
            raise UserError("measuring this machine failed", fix="see what is printed above")
        cluster = _cluster(arguments)
    given = build(None)
    strategy = named_strategy(given)
    config = choose_model(given, cluster.machine, cluster.num_processes, strategy, [])
    find_model(config.model)  # a refusal says why, before layouts are tried
    only = _typed(arguments).get("strategy", AUTO)
    config = _choose_batch(arguments, config, cluster)
    if arguments.tokens is not None:
        _set_tokens(arguments, config, cluster)
    choices = _rank(arguments, build, cluster, config, only)
    if not choices:  # refused as the strategy is that says most
        lay_out(cluster, build("dp" if only == AUTO else only))
        raise UserError(f"no strategy runs {config.model} as CONFIG has it", fix="see --dry-run")
    if arguments.json:
        print(json.dumps([as_dict(choice) for choice in choices], indent=1))
        return 0
    fitting = [choice for choice in choices if choice.room in ("yes", "tight")]
    if not fitting:
        raise _fits_nowhere(choices, cluster)
    picks = pick(fitting)
    labels = {id(choice): label for label, choice in picks}
    listed = [choice for _, choice in picks]
    listed += [choice for choice in fitting if id(choice) not in labels]
    if arguments.all:
        listed += [choice for choice in choices if choice not in fitting]
    batch = choices[0].plan.batch
    tokens = f"{batch.global_batch_size} x {config.max_length} tokens per step"
    print(f"{config.model} on {cluster.name}: {tokens}, {plural(len(choices), 'layout')}\n")
    listed = listed if arguments.all else listed[:SHOWN]
    print(table(listed, labels, every=arguments.all))
    print()
    if len(fitting) > len(listed):
        hidden = len(fitting) - len(listed)
        print(f"{hidden} more that fit and {len(choices) - len(fitting)} that do not: --all")
    gbit = None
    if cluster.num_processes > cluster.processes_a_node and cluster.rates is not None:
        gbit = config.network_gbit or 8 * cluster.rates.network_bytes / 1e9
    first = picks[0][1]
    lines = [legend(listed, cluster, gbit, every=arguments.all), why_first(first, fitting)]
    lines += [work_asked(label, choice, arguments.price) for label, choice in picks]
    for text in filter(None, lines):
        print(textwrap.fill(text, WIDTH))
    print()
    for choice in [choice for _, choice in picks]:
        words = options_of(choice.plan, arguments, configure)
        print(f"  {launch_command(choice.plan, os.path.relpath(script), words)}")
    if job_file is not None:
        words = options_of(first.plan, arguments, configure, elsewhere=True)
        on = ["--cluster", arguments.cluster] if arguments.cluster else []
        on += ["--gpu", arguments.gpu] if arguments.gpu else []
        job = batch_script(first, job_file, script, words, on=on, typed=command)
        job_file.parent.mkdir(parents=True, exist_ok=True)
        job_file.write_text(job, encoding="utf-8")
        try_it = f"check it with: bash {job_file}; submit it with: sbatch {job_file}"
        print(f"wrote {job_file}; {try_it}")
    return 0


def _cluster(arguments: argparse.Namespace) -> Cluster:
    """That of --cluster, or this machine; its network as --network_gbit says."""
    gpu = arguments.gpu
    if arguments.cluster is not None:
        cluster = parse_cluster(arguments.cluster, gpu)
    else:
        machine = detect_machine()
        if gpu is not None and machine.num_gpus == 0:
            fix = f"say how many: --cluster 1x8 --gpu {shlex.quote(gpu)}"
            raise UserError("--gpu describes GPUs and this machine has none", fix=fix)
        count = requested_processes(arguments.num_gpus or "all", machine, mesh={})
        cluster = this_machine(machine, count, count, gpu)
    return cluster


def _fits_nowhere(choices: Sequence[Prediction], cluster: Cluster) -> UserError:
    """The layout that needs least, and the machine that would have it."""
    if roomy := [c for c in choices if c.room_on_gpu != "no"]:
        least = min(roomy, key=lambda choice: choice.memory.host_bytes)
        check_memory(least, lambda _: [])  # RAM is what lacks
    least = min(choices, key=lambda choice: choice.memory.needed_bytes)
    needed = least.memory.needed_bytes / GIB
    what = f"{least.plan.config.model} fits nowhere on {cluster.name}"
    why = f"{least.plan.strategy.name} needs least, {needed:.1f} GiB per process"
    fix = "set activation_checkpointing to full, or a smaller batch_size, max_length or model"
    if cluster.machine.num_gpus:
        fix = f"take GPUs with {needed:.0f} GiB or more of them, or {fix}"
    return UserError(what, why, fix)


def _typed(arguments: argparse.Namespace) -> dict[str, str]:
    """The keys on the command line, by their own names."""
    names = {name: key.name for key in KEYS.values() for name in (key.name, *key.aliases)}
    texts = (text.partition("=") for text in arguments.overrides)
    return {names.get(name.strip(), name.strip()): value for name, _, value in texts}


def _override(arguments: argparse.Namespace, **values: Any) -> None:
    """Put values over what was typed, under whatever name."""
    names = {name for key in values for name in (key, *KEYS[key].aliases)}
    kept = [text for text in arguments.overrides if text.partition("=")[0].strip() not in names]
    arguments.overrides[:] = [*kept, *(f"{key}={value}" for key, value in values.items())]


def _choose_batch(arguments: argparse.Namespace, config: Request, cluster: Cluster) -> Request:
    """Decide the batch size on GPUs if nobody set it, with recomputation if nothing fits else."""
    is_open = config.batch_size == AUTO
    is_open |= cluster.machine.num_gpus > 0 and not config.is_set("batch_size")
    if not is_open:
        return config
    is_set = config.is_set("activation_checkpointing")
    modes: Sequence[str] = [config.activation_checkpointing] if is_set else MODES
    for mode in modes:
        open_config = with_values(
            config, strategy=AUTO, batch_size=AUTO, activation_checkpointing=mode
        )
        try:
            chosen, _ = choose_spread(open_config, cluster, None, [])
        except UserError:
            if mode == modes[-1] and config.batch_size == AUTO:
                raise
            continue
        _override(arguments, batch_size=chosen.batch_size)
        return with_values(config, batch_size=chosen.batch_size)
    return config


def _set_tokens(arguments: argparse.Namespace, config: Request, cluster: Cluster) -> None:
    """Stop after as many steps as --tokens makes."""
    found = _COUNT.fullmatch(arguments.tokens.replace(",", "").replace("_", ""))
    tokens = 0.0
    if found:
        tokens = float(found[1]) * 10 ** int(found[2] or 0) * _SIZES[found[3].lower()]
    if not 1 <= tokens < 1e18:
        what = f"--tokens {shown(arguments.tokens)} is not a number of tokens"
        raise UserError(what, fix="write 300M, 1B or 2e9")
    if "max_steps" in _typed(arguments):
        raise UserError("--tokens and --max_steps say the same", fix="leave out one of them")
    step = int(config.batch_size) * config.grad_accum_steps * cluster.num_processes
    _override(arguments, max_steps=math.ceil(tokens / (step * config.max_length)))


def _rank(
    arguments: argparse.Namespace,
    build: Callable[[str | None], Request],
    cluster: Cluster,
    config: Request,
    only: str,
) -> list[Prediction]:
    """All layouts, the best first; if nobody set activation_checkpointing, each that does not fit
    with as much recomputation as it needs."""
    choices = rank_layouts(build, cluster, config.strategy, only=only)
    if config.is_set("activation_checkpointing") or not cluster.machine.num_gpus:
        return choices
    for mode in MODES[1:]:
        lacking = {layout_name(c.plan): c for c in choices if c.room != "yes"}
        if not lacking:
            break

        def recomputing(name: str, mode: str = mode) -> Request:
            return with_values(build(name), activation_checkpointing=mode)

        again = rank_layouts(recomputing, cluster, config.strategy, only=only)
        better = {
            name: choice
            for choice in again
            if (name := layout_name(choice.plan)) in lacking
            and ROOMS.index(choice.room) < ROOMS.index(lacking[name].room)
        }
        choices = [better.get(layout_name(choice.plan), choice) for choice in choices]
    return sorted(choices, key=lambda choice: choice.order)


def as_dict(choice: Prediction) -> dict[str, Any]:
    """A layout for programs: `memory_bytes` is component -> bytes by rank."""
    plan = choice.plan
    places = choice.memory.by_place
    each = plan.num_processes // len(places)
    by_rank = {part: [place[part] for place in places for _ in range(each)] for part in places[0]}
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
