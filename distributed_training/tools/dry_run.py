"""Print a run's plan and its start command without starting the run. This module does not import
torch."""

import argparse
import json
import os
import secrets
import shlex
import textwrap
from dataclasses import replace
from pathlib import Path

from distributed_training.checkpoint.resume import choose_checkpoint
from distributed_training.plan.layout import format_axes
from distributed_training.plan.plan import Draft, Plan
from distributed_training.planner.data import peek_data
from distributed_training.planner.make_plan import make_plan
from distributed_training.predict.predict import Cluster, local_cluster, parse_cluster
from distributed_training.records.display import describe_prediction, describe_work, fold
from distributed_training.settings.config import Request
from distributed_training.settings.detect import detect_machine
from distributed_training.settings.errors import printable
from distributed_training.start.launch import requested_cluster
from distributed_training.supervise.process import Process
from distributed_training.tools.jobs import build_options

FIRST_HOST = "FIRST_HOST"  # placeholder in a launch command for several nodes
UNKNOWN = "the number of steps is unknown until the data is tokenized (the data command does this)"
FIRST_HOST_NOTE = f"Replace {FIRST_HOST} with the name of the first node."


def planned_cluster(arguments: argparse.Namespace) -> Cluster | None:
    """Return the cluster that --cluster and --gpu describe, or None without these options. Without
    --cluster, it has as many GPUs as this machine, at least one."""
    if arguments.cluster is None and arguments.gpu is None:
        return None
    return parse_cluster(arguments.cluster or str(max(1, detect_machine().num_gpus)), arguments.gpu)


def print_plan(
    request: Request, process: Process | None, script: Path, options: argparse.Namespace
) -> int:
    """Print a plan and the command that starts the run. Return the exit code. The plan is for the
    cluster given by --cluster or, without --cluster, for the processes that the launcher started.
    Without a launcher, the plan is for this machine."""
    launched = None
    if process is not None:
        if process.rank > 0:
            return 0
        launched = local_cluster(detect_machine(), process.world_size, process.local_world_size)
    cluster = planned_cluster(options) or launched or requested_cluster(request, options.num_gpus)
    plan = make_plan(request, cluster, peek_data, needs_weights=request.strict)
    notes = [*plan.notes]
    checkpoint = choose_checkpoint(plan, notes)
    plan = replace(plan, checkpoint=checkpoint, notes=tuple(notes))
    command = launch_command(
        plan,
        os.path.relpath(script),
        build_options(plan, options),
    )
    command = "(the current command, without --dry-run)" if process else command
    print(describe_plan(plan, command, explain=options.explain))
    return 0


def launch_command(
    plan: Draft,
    script: str,
    arguments: list[str],
) -> str:
    """Return the command to run on each node to execute `plan`. `arguments` are the script's
    options."""
    processes_here = plan.processes_here
    num_nodes = plan.num_processes // processes_here
    launcher = ["python", script]
    if num_nodes > 1:
        # By default, torchrun waits ten minutes for the other nodes.
        timeout = f"--rdzv_conf=join_timeout={plan.config.rendezvous_timeout_s}"
        launcher = [
            "torchrun",
            f"--nnodes={num_nodes}",
            "--rdzv_backend=c10d",
            f"--rdzv_endpoint={FIRST_HOST}:29500",
            f"--rdzv_id={secrets.token_hex(8)}",  # an id that cannot be guessed
            timeout,
            f"--nproc_per_node={processes_here}",
            script,
        ]
    elif processes_here > 1:
        launcher += ["--num_gpus", str(processes_here)]
    return shlex.join([*launcher, *arguments])


def describe_plan(
    plan: Plan,
    command: str,
    *,
    explain: bool,
) -> str:
    """Describe a plan: its verdict, batch, steps and notes, and the launch command. With `explain`,
    add the resolved CONFIG, mesh and DeepSpeed configuration."""
    source = os.path.relpath(plan.strategy.source)
    num_steps = plan.amount.num_steps if plan.amount else None
    predicted = describe_prediction(
        plan.prediction,
        num_steps,
        on_gpu=plan.machine.num_gpus > 0,
    )
    lines = [
        fold(plan.verdict),
        f"  batch: {plan.batch.describe()}",
        f"  work: {describe_work(plan.amount)}" if plan.amount else f"  {UNKNOWN}",
        f"  predicted: {predicted}",
        f"  resumes from: {plan.checkpoint}" if plan.checkpoint else "",
        f"launch command\n  {printable(command)}",
        f"  Run this command on every node. {FIRST_HOST_NOTE}" if FIRST_HOST in command else "",
        *(f"note: {printable(note)}" for note in plan.notes),
    ]
    if not explain:
        lines.append("To show all settings, add --explain.")
        return "\n".join(filter(None, lines))
    lines.append("resolved CONFIG")
    requested = plan.requested.to_key_values()
    for key, value in plan.settings.items():
        origin = "" if requested[key] == value else f"    (was {requested[key]!r})"
        lines.append(f"  {key:<24} {value!r}{origin}")
    lines.append(f"mesh (from {source}): {format_axes(plan.mesh)}")
    if plan.deepspeed_json is not None:
        text = json.dumps(plan.deepspeed_json, indent=2)
        lines += [f"DeepSpeed configuration (from {source})", textwrap.indent(text, "  ")]
    return "\n".join(filter(None, lines))
