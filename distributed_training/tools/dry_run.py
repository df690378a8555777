"""Print a run's plan and its start command without starting the run. This module does not import
torch."""

import argparse
import json
import os
import secrets
import textwrap
from dataclasses import replace
from pathlib import Path

from distributed_training.checkpoint.resume import choose_checkpoint
from distributed_training.plan.layout import format_axes
from distributed_training.plan.plan import Plan
from distributed_training.planner.data import peek_data
from distributed_training.planner.make_plan import make_plan
from distributed_training.predict.predict import local_cluster
from distributed_training.records.display import describe_prediction, describe_work, fold
from distributed_training.settings.config import Request
from distributed_training.settings.detect import detect_machine
from distributed_training.settings.errors import printable
from distributed_training.start.local import requested_cluster
from distributed_training.supervise.process import Process
from distributed_training.tools.jobs import FIRST_HOST, FIRST_HOST_NOTE, launch_command
from distributed_training.tools.plan import planned_cluster

UNKNOWN = "the number of steps is unknown until the data is tokenized (the data command does this)"


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
    cluster = planned_cluster(options) or launched
    if cluster is None:
        cluster = requested_cluster(request, options.num_gpus, times_cores=True)
    plan = make_plan(request, cluster, peek_data, needs_weights=request.strict)
    notes = [*plan.notes]
    checkpoint = choose_checkpoint(plan, notes)
    plan = replace(plan, checkpoint=checkpoint, notes=tuple(notes))
    command = launch_command(plan, script, job_id=secrets.token_hex(8))
    command = "(the current command, without --dry-run)" if process else command
    print(describe_plan(plan, command, explain=options.explain))
    return 0


def describe_plan(plan: Plan, command: str, *, explain: bool) -> str:
    """Describe a plan: its verdict, batch, steps and notes, and the launch command. With `explain`,
    add the resolved CONFIG, mesh and DeepSpeed configuration."""
    source = os.path.relpath(plan.strategy.source)
    predicted = describe_prediction(plan.prediction, on_gpu=plan.machine.num_gpus > 0)
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
