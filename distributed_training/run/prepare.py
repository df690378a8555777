"""From CONFIG to a plan that processes can carry out, in a folder of its own. No torch import."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

from filelock import FileLock

from distributed_training.advise.make import decide_plan
from distributed_training.data.samples import Data
from distributed_training.plan.deepspeed_json import fill_deepspeed_json
from distributed_training.plan.machine import Machine
from distributed_training.plan.plan import PLAN_AS_JSON, PLAN_FILE, Plan
from distributed_training.records.record import new_run_dir
from distributed_training.run.saving import claims
from distributed_training.run.saving.resume import describe_change, find_resume, identity, read_meta
from distributed_training.settings.config import AUTO, RunConfig

LATEST = "latest"  # in output_dir, a link to the newest run's folder


def make_plan(
    config: RunConfig,
    machine: Machine,
    *,
    num_processes: int,
    processes_here: int,
    cut: Callable[[Plan], Data | None] = lambda plan: None,
) -> Plan:
    """Decide and check everything about a run; raise UserError at the first obstacle.

    What may have to be downloaded comes last. `cut` gives the run's samples, where they are wanted.
    """
    plan = decide_plan(config, machine, num_processes, processes_here, cut)
    return _with_deepspeed_json(_at_checkpoint(plan))


def _at_checkpoint(plan: Plan) -> Plan:
    """The plan as it goes on from an earlier run, where `resume` says so and there is one."""
    resume, ranks = plan.config.resume, plan.ranks_beside(0)
    found = find_resume(resume, plan.output_dir, plan.work, plan.spread, ranks)
    if found is None:
        return plan
    plan = replace(plan, run_dir=found[0], checkpoint=found[1])
    if change := describe_change(read_meta(found[1]).spread, plan.spread):
        plan.notes.append(change)
    return plan


def _with_deepspeed_json(plan: Plan) -> Plan:
    if not plan.strategy.traits.takes_deepspeed_json:
        return plan
    document = fill_deepspeed_json(plan.strategy, plan.config, plan.batch, str(plan.offload_dir))
    return replace(plan, deepspeed_json=document)


def reserve_run_dir(plan: Plan) -> Plan:
    """Make the run's folder, under the next free name where another run was quicker, write the plan
    into it, and let <output_dir>/latest point to it. Raises UserError where it would be a run that
    another process has, also one that began since the plan was made.
    """
    plan.output_dir.mkdir(parents=True, exist_ok=True)
    with FileLock(plan.output_dir / ".lock"):
        if plan.config.resume == AUTO:
            plan = _with_deepspeed_json(_at_checkpoint(plan))
        return _reserve(plan)


def _reserve(plan: Plan) -> Plan:
    while plan.checkpoint is None:
        try:
            plan.run_dir.mkdir(parents=True)
            break
        except FileExistsError:
            label, count = plan.model.label, plan.num_processes
            run_dir = new_run_dir(plan.output_dir, plan.strategy.name, label, count)
            offload_dir = plan.offload_dir and plan.offload_dir.with_name(run_dir.name)
            plan = _with_deepspeed_json(replace(plan, run_dir=run_dir, offload_dir=offload_dir))
    claims.claim(plan.run_dir, identity(plan.work, plan.spread))
    (plan.run_dir / PLAN_FILE).write_bytes(PLAN_AS_JSON.dump_json(plan, indent=2))
    with contextlib.suppress(OSError):  # a file system without links
        latest = plan.output_dir / f".latest-{plan.run_dir.name}"
        latest.symlink_to(plan.run_dir.name)
        latest.replace(plan.output_dir / LATEST)
    return plan
