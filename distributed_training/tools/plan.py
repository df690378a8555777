"""Every layout of every strategy, ranked by predicted time; nothing runs.

No torch import.
"""

import argparse
import dataclasses
import json
import shlex
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from distributed_training.advise import scaling, show
from distributed_training.advise.make import check_memory
from distributed_training.advise.rank import choose_spread, rank_layouts
from distributed_training.plan.choose import choose_model
from distributed_training.predict.predict import Cluster, Prediction, parse_cluster, this_machine
from distributed_training.predict.rates import calibration_file
from distributed_training.records.display import WIDTH
from distributed_training.run.launch import requested_processes
from distributed_training.run.ranks import run_ranks
from distributed_training.settings.config import AUTO, RunConfig, with_values
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import expand_home
from distributed_training.settings.machine import GIB, detect_machine

SHOWN = 15  # layouts, without --all
BEST = 3


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `plan` takes besides CONFIG's keys."""
    add = parser.add_argument
    add("--gpu", metavar="GPU", help="a GPU of the table, or JSON that describes one")
    add("--network_gbit", type=float, metavar="N",
        help="between nodes, of each GPU: Gbit/s, as links measures it")  # fmt: skip
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
        print(json.dumps([show.as_dict(choice) for choice in choices], indent=1))
        return 0
    fitting = [choice for choice in choices if choice.fits]
    if not fitting:
        raise _fits_nowhere(choices, cluster)
    batch = choices[0].plan.batch.global_batch_size
    tokens = f"{batch} x {config.max_length} tokens a step"
    print(f"{config.model} on {cluster.name}: {tokens}, {len(choices)} layouts\n")
    print(show.table(choices if arguments.all else fitting[:SHOWN]))
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
    if cluster.nodes > 1 and rates is not None:
        gbit = 8 * rates.network_bytes / 1e9
        legend += f" Between nodes each GPU has {gbit:g} Gbit/s: --network_gbit sets it."
    for text in (legend, show.why_first(fitting[0], fitting[1:])):
        print(textwrap.fill(text, WIDTH))
    print()
    typed = dict(text.split("=", 1) for text in arguments.overrides)
    for choice in fitting[:BEST]:
        words = show.options_of(choice.plan, typed)
        print(f"  {show.launch_command(choice.plan, script.name, words)}")
    if arguments.write:
        path = Path(expand_home("--write", arguments.write))
        words = show.options_of(fitting[0].plan, typed)
        path.write_text(show.batch_script(fitting[0], script, words), encoding="utf-8")
        print(f"wrote {path}")
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
    gbit = arguments.network_gbit
    if gbit is None or cluster.rates is None:
        return cluster
    if gbit <= 0:
        raise UserError("--network_gbit is more than 0")
    rates = dataclasses.replace(cluster.rates, network_bytes=gbit * 1e9 / 8)
    return dataclasses.replace(cluster, rates=rates)


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
