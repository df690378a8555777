"""From CONFIG to processes: the plan is made here, once, unless a launcher came first. No torch."""

from __future__ import annotations

import json
import os
from pathlib import Path

from distributed_training.data.corpus import read_corpus
from distributed_training.plan import plan as planning
from distributed_training.plan.machine import detect_machine
from distributed_training.plan.make import make_plan, reserve_run_dir
from distributed_training.plan.plan import Plan
from distributed_training.plan.topology import show_axes
from distributed_training.records.display import gib
from distributed_training.run import launch
from distributed_training.settings.config import RunConfig
from distributed_training.settings.strategies import load_strategy


def start(
    config: RunConfig, script: Path, arguments: list[str], *, num_gpus: str | None, dry_run: bool
) -> int:
    """Train under `config`: as a worker when a launcher started this process, else plan, and start
    as many processes as `num_gpus` says. Returns the exit code.

    `script` and `arguments` are what a person typed.
    """
    process = launch.current_process(os.environ)
    if process is not None:
        launch.check_world_size(num_gpus, process)
        if not dry_run:
            return _run(config, process)
        if process.rank > 0:
            return 0
    machine = detect_machine()
    if process is not None:
        count, here = process.world_size, process.local_world_size
    else:
        count = here = launch.requested_processes(num_gpus, machine, load_strategy(config).mesh)
    plan = make_plan(config, machine, num_processes=count, processes_here=here)
    if dry_run:
        read_corpus(plan.config.dataset)  # fails where it cannot be read
        typed = "(this one)" if process else launch.typed_command(plan, str(script), arguments)
        print(describe_plan(plan, typed))
        return 0
    if count == 1 and machine.num_gpus > 1:
        print(f"using 1 of {machine.num_gpus} GPUs; --num_gpus all uses all")
    planning.load_plan_data(plan)  # too little text is found before processes start
    plan = reserve_run_dir(plan)
    if count == 1:
        return _run(plan, launch.single_process())
    launch.prepare_environment(count)
    return launch.spawn(launch.launch_command(plan, str(script)), plan)


def start_planned(run_dir: Path) -> int:
    """Run this process's part of the plan in `run_dir`, which the launching process made."""
    process = launch.current_process(os.environ)
    assert process is not None
    return _run(planning.load_plan(run_dir), process)


def _run(given: Plan | RunConfig, process: launch.Process) -> int:
    launch.prepare_environment(process.local_world_size)
    from distributed_training.run import worker

    return worker.run(given, process)


def describe_plan(plan: Plan, typed_command: str) -> str:
    """CONFIG as decided, how the batch is cut, the command, the mesh and the DeepSpeed JSON."""
    requested = plan.requested.to_user_words()
    source = os.path.relpath(plan.strategy.source)
    lines = ["resolved CONFIG"]
    for key, value in plan.config.to_user_words().items():
        was = "" if requested[key] == value else f"    (was {requested[key]!r})"
        if key in plan.config.from_defaults:
            was = "    (the strategy's default)"
        lines.append(f"  {key:<24} {value!r}{was}")
    lines += [
        f"  batch: {plan.batch.describe()}",
        f"  expected per process: {gib(plan.state.on_device)} of state, "
        f"{gib(plan.activation_bytes)} of activations",
        *(f"  note: {note}" for note in plan.notes),
        *([f"  resumes {plan.checkpoint}"] if plan.checkpoint else []),
        "launch command",
        f"  {typed_command}",
        f"mesh (from {source}): {show_axes(plan.mesh)}",
    ]
    if plan.mesh["pp"] > 1:
        blocks = ", ".join(map(str, plan.layout.blocks_per_stage))
        lines += [f"pipeline: {plan.config.pipeline_schedule}, blocks a stage {blocks}"]
    if plan.deepspeed_json is not None:
        lines += [f"DeepSpeed JSON (from {source})"]
        lines += ["  " + line for line in json.dumps(plan.deepspeed_json, indent=2).splitlines()]
    return "\n".join(lines)
