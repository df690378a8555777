"""What the processes of torchrun, deepspeed or srun agree on: a plan, which rank 0 makes for all,
and where each node keeps its files."""

import contextlib
import json
import os
import socket
import time
import uuid
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import psutil

from distributed_training.parallel.agree import (
    Gather,
    check_ranks_agree,
    failing_together,
    from_rank_0,
)
from distributed_training.plan import data as plan_data
from distributed_training.plan.plan import PLAN_FILE, Plan, load_plan
from distributed_training.records.record import code, versions
from distributed_training.run.prepare import (
    make_plan,
    plan_as_text,
    plan_from_text,
    reserve_run_dir,
    share_batch,
    started_again,
    write_plan,
)
from distributed_training.run.ranks import Process
from distributed_training.run.saving import resume
from distributed_training.settings.config import RunConfig, with_values
from distributed_training.settings.errors import UserError
from distributed_training.settings.machine import detect_machine

SHARED_WITHIN_S = 10.0  # in which a network disk shows a new folder to other machines


def current_agent() -> str | None:
    """The agent of torchrun that started this process (host, number, since when); else None."""
    agent = psutil.Process().parent() if "TORCHELASTIC_RUN_ID" in os.environ else None
    return agent and f"{socket.gethostname()} {agent.pid} {agent.create_time()}"


def agree_on_plan(
    config: RunConfig, process: Process, ask: Gather, agent: str | None = None
) -> Plan:
    """The plan that rank 0 makes, on all ranks; raises its UserError on all, and where another rank
    was given other values or runs other code. Where this process's `agent` has begun a run already,
    the plan goes on with it. Collective."""
    typed = config.to_user_words()
    del typed["output_dir"]  # as a path: checkouts may lie in different places
    check_ranks_agree({**typed, **versions(), **code()}, ask)
    launchers = sorted(set(ask(agent))) if agent else []

    def make() -> Plan:
        sizes = {"num_processes": process.world_size, "processes_here": process.local_world_size}
        going_on, notes = go_on(config, launchers, process.world_size)
        plan = make_plan(going_on, detect_machine(), **sizes, cut=plan_data.cut_data)
        return reserve_run_dir(replace(plan, launchers=launchers, notes=[*plan.notes, *notes]))

    return plan_from_text(ask(plan_as_text(make) if process.rank == 0 else "")[0])


def go_on(
    config: RunConfig, launchers: Iterable[str], num_processes: int
) -> tuple[RunConfig, list[str]]:
    """CONFIG for so many processes to go on with the run that one of these launchers
    (`Plan.launchers`) has begun, with its global batch and from its last checkpoint; and a note.
    Unchanged where there is none. Raises UserError where they cannot share the batch evenly."""
    begun = None
    files = Path(config.output_dir).glob(f"*/{PLAN_FILE}") if launchers else ()
    for file in sorted(files):
        with contextlib.suppress(OSError, ValueError):
            if set(launchers).intersection(json.loads(file.read_bytes()).get("launchers", ())):
                begun = file.parent.resolve()  # the newest
    if begun is None:
        return config, []
    before = load_plan(begun)
    saved, note = started_again(before)
    if saved:
        config = with_values(config, resume=str(saved))
    config, cut = share_batch(config, before, num_processes)
    return config, ["; ".join([note, *cut])]


def check_disks(plan: Plan, process: Process) -> None:
    """See to it that all nodes have the run's folder: one that they share or, with
    shared_disk=False, each its own, and what it needs of the checkpoint to go on from. Raises
    UserError on every rank where that is not so. Collective."""
    leads = process.local_rank == 0
    who = f"rank {process.rank} on {socket.gethostname()}"
    mark = plan.run_dir / from_rank_0(f".disk-{uuid.uuid4().hex}")
    try:
        with failing_together():
            if leads and plan.own_disks:
                _make_folder(plan, mark, who)
            elif leads:
                _see_folder(plan, who)
    finally:
        if leads:
            mark.unlink(missing_ok=True)
    if plan.own_disks and plan.checkpoint is not None:
        mine = resume.read_meta(plan.checkpoint) if process.rank == 0 else None
        host, values = from_rank_0((socket.gethostname(), mine and mine.model_dump()))
        meta = resume.Meta(**values)
        meta.hosts = meta.hosts or dict.fromkeys(meta.files, host)
        with failing_together():
            if leads and process.rank:  # where the run was planned they have been read
                resume.check_files(plan.checkpoint, meta, plan, process.rank)


def _see_folder(plan: Plan, who: str) -> None:
    """Checkpoints of all nodes lie in one folder, which rank 0 has made, with the plan in it."""
    fix = "set output_dir to a folder on a disk that all nodes share, or shared_disk to False"
    end = time.monotonic() + SHARED_WITHIN_S
    while not (plan.run_dir / PLAN_FILE).is_file():
        if time.monotonic() > end:
            what = f"{who} does not see {plan.run_dir}, which rank 0 has made"
            raise UserError(what, "a run is saved into one folder", fix)
        time.sleep(0.2)


def _make_folder(plan: Plan, mark: Path, who: str) -> None:
    """This node's own folder of the run, with the plan in it."""
    try:
        plan.run_dir.mkdir(parents=True, exist_ok=True)
        mark.touch(exist_ok=False)  # the first of those that share a disk succeeds, on any disk
        write_plan(plan)
    except FileExistsError:
        what = f"{who} sees another node's {plan.run_dir}"
        raise UserError(what, "with shared_disk=False each has its own", "set it to True") from None
    except OSError as error:
        what = f"{who} cannot make {plan.run_dir}"
        raise UserError(what, str(error.strerror), "set output_dir elsewhere") from None
