"""Every layout of every strategy, ranked by predicted time; nothing runs. No torch import."""

import argparse
import json
import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tabulate import DataRow, TableFormat, tabulate

from distributed_training.advise import scaling
from distributed_training.advise.make import check_memory
from distributed_training.advise.rank import choose_spread, layout_name, rank_layouts
from distributed_training.plan.choose import choose_model
from distributed_training.predict.memory import STATE
from distributed_training.predict.predict import Cluster, Prediction, parse_cluster, this_machine
from distributed_training.predict.rates import FITTED, calibration_file
from distributed_training.records.display import WIDTH
from distributed_training.run.launch import launch_command, requested_processes
from distributed_training.run.ranks import run_ranks
from distributed_training.settings.config import AUTO, RunConfig, with_values
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import expand_home
from distributed_training.settings.machine import GIB, detect_machine
from distributed_training.tools.jobs import batch_script, options_of

SHOWN = 15  # layouts, without --all
_CELLS = DataRow("", " ", "")
ONE_SPACE = TableFormat(None, None, None, None, _CELLS, _CELLS, padding=0, with_header_hide=None)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `plan` takes besides CONFIG's keys."""
    add = parser.add_argument
    add("--write", metavar="FILE", help="write the best layout as a SLURM job")
    add("--calibrate", action="store_true",
        help="measure this machine first, about a minute; used from then on")  # fmt: skip
    law = "what that compute is best spent on, by Chinchilla's law and its replication"
    add("--budget", metavar='"8xH200 24h"', help=law)
    add("--target_loss", type=float, metavar="NATS",
        help="the other way round: what that loss costs; with --cluster also how long")  # fmt: skip
    add("--json", action="store_true", help="all layouts, for programs")
    add("--all", action="store_true", help=f"all layouts, not the best {SHOWN}")


def run(
    arguments: argparse.Namespace, configure: Callable[[Sequence[str]], RunConfig], script: Path
) -> int:
    """Rank and print; `configure` gives CONFIG with `key=value` texts."""
    command = shlex.join(["python", *sys.argv])

    def build(strategy: str | None) -> RunConfig:
        chosen = [] if strategy is None else [f"strategy={strategy}"]
        return configure([*arguments.overrides, *chosen])

    if arguments.budget is not None or arguments.target_loss is not None:
        return scaling.run(arguments, build)
    cluster = _cluster(arguments)
    if arguments.calibrate:
        if arguments.cluster is not None:
            raise UserError("--calibrate measures this machine", fix="leave out --cluster")
        count = cluster.num_processes
        file = calibration_file(cluster.machine.gpu_name or f"cpu-x{count}")
        # With all processes that are planned for; they need torch.
        if run_ranks([str(script), "calibrate", str(file)], count).exit_code != 0:
            raise UserError("measuring this machine failed", fix="see what is printed above")
        cluster = _cluster(arguments)
    config = choose_model(build(None), cluster.machine, cluster.num_processes, [])
    if config.batch_size == AUTO:
        config = choose_spread(with_values(config, strategy=AUTO), cluster, [])
        arguments.overrides.append(f"batch_size={config.batch_size}")
    choices = rank_layouts(build, cluster, config.strategy)
    if not choices:
        raise UserError(f"no strategy runs {config.model} as CONFIG has it", fix="see --dry-run")
    if arguments.json:
        print(json.dumps([as_dict(choice) for choice in choices], indent=1))
        return 0
    fitting = [choice for choice in choices if choice.fits]
    if not fitting:
        raise _fits_nowhere(choices, cluster)
    tokens = f"{choices[0].plan.batch.global_batch_size} x {config.max_length} tokens a step"
    print(f"{config.model} on {cluster.name}: {tokens}, {len(choices)} layouts\n")
    print(table(choices if arguments.all else fitting[:SHOWN]))
    print()
    if len(fitting) > SHOWN and not arguments.all:
        hidden = len(fitting) - SHOWN
        print(f"{hidden} more that fit and {len(choices) - len(fitting)} that do not: --all")
    legend = (
        "GiB of the fullest process: all, state, activations, and other (copies, buffers, CUDA and "
        "NCCL); likely: how much quicker and slower such runs were. "
    )
    rates = cluster.rates
    if rates is None:
        legend += "This GPU is not in the table: --gpu describes it."
    elif rates.measured_at:
        legend += f"Times go by what was measured here on {rates.measured_at[:10]}."
    else:
        legend += "Times are estimated from datasheets, the host's part guessed."
    if cluster.num_processes > cluster.processes_a_node and rates is not None:
        gbit = config.network_gbit or 8 * rates.network_bytes / 1e9
        legend += f" Between nodes each GPU has {gbit:g} Gbit/s: --network_gbit sets it."
    for text in (legend, why_first(fitting[0], fitting[1:])):
        print(textwrap.fill(text, WIDTH))
    print()
    for choice in fitting[:3]:
        words = options_of(choice.plan, arguments, configure)
        print(f"  {launch_command(choice.plan, os.path.relpath(script), words)}")
    if arguments.write:
        path = Path(expand_home("--write", arguments.write))
        words = options_of(fitting[0].plan, arguments, configure, elsewhere=True)
        on = ["--cluster", arguments.cluster] if arguments.cluster else []
        on += ["--gpu", arguments.gpu] if arguments.gpu else []
        job = batch_script(fitting[0], path, script, words, on=on, typed=command)
        path.write_text(job, encoding="utf-8")
        print(f"wrote {path}; check it with: bash {path}; submit it with: sbatch {path}")
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
    why = f"{least.plan.strategy.name} needs least, {needed:.1f} GiB a process"
    fix = "set activation_checkpointing to full, or a smaller batch_size, max_length or model"
    if cluster.machine.num_gpus:
        fix = f"take GPUs with {needed:.0f} GiB or more of them, or {fix}"
    return UserError(what, why, fix)


def table(choices: Sequence[Prediction]) -> str:
    """One row a layout: GiB of the fullest process, in all and by component."""
    strategies = [choice.plan.strategy for choice in choices]
    away = any(each.steps_on_host or each.fetches_parameters for each in strategies)
    rows = [_row(choice, away) for choice in choices]
    sides = ["left", *["right"] * (len(rows[0]) - 2), "left"]
    lines = [[*rows[0]], *(row.values() for row in rows)]  # as headings they get padding
    return tabulate(lines, tablefmt=ONE_SPACE, disable_numparse=True, colalign=sides)


def _row(choice: Prediction, away: bool) -> dict[str, str]:
    memory = choice.memory
    parts = memory.fullest
    sizes = {
        "GiB": memory.needed_bytes,
        "state": sum(parts[name] for name in STATE),
        "acts": parts["activations"] + parts["logits"],
        "other": parts["copies"] + parts["buffers"] + memory.context_bytes,
    }
    if away:
        sizes |= {"RAM": memory.host_bytes, "disk": memory.disk_bytes}
    speed = dict.fromkeys(("s/step", "tok/s", "MFU", "likely", "bound by"), "-")
    if choice.step is not None:
        likely = (100 * (share - 1) for share in vars(FITTED.likely_s)[choice.kind])
        speed |= {
            "s/step": f"{choice.step.seconds:.3f}",
            "tok/s": scaling.count(choice.tokens_per_s or 0.0),
            "likely": "{:+.0f}/{:+.0f}%".format(*likely),
            "bound by": choice.step.bound_by,
        }
    if choice.mfu is not None:
        speed["MFU"] = f"{100 * choice.mfu:.0f}%"
    gibs = {name: scaling.count(size / GIB) for name, size in sizes.items()}
    return {"layout": layout_name(choice.plan), "fits": choice.room, **gibs, **speed}


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
        "memory_bytes": by_rank,
        "step_time_s": choice.step and choice.step.seconds,
        "tokens_per_s": choice.tokens_per_s,
        "likely_s": choice.likely_s,
        "likely_bytes": choice.memory.likely_bytes,
    }


def why_first(best: Prediction, others: Sequence[Prediction]) -> str:
    """One sentence on the first choice, against the quickest of another strategy."""
    name = layout_name(best.plan)
    step = best.step
    if step is None:
        return f"{name} needs least memory; how fast it is cannot be told without the GPU's rates."
    said = f"{name} is the quickest that fits: its step of {step.seconds:.3f} s is mostly "
    said += step.bound_by
    for other in others:
        if other.plan.strategy.name != best.plan.strategy.name and other.step:
            times = other.step.seconds / step.seconds
            more = f"{times:.1f} times as long" if times > 2 else f"{times - 1:.1%} longer"
            return f"{said}; {layout_name(other.plan)} takes {more}."
    return f"{said}."
