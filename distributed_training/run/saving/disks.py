"""Which nodes see one another's files, and what each keeps where they do not."""

import socket
import time
import uuid
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from distributed_training.parallel.agree import failing_together, from_rank_0, gather
from distributed_training.parallel.tensor_files import COPY, Part
from distributed_training.plan.plan import PLAN_FILE, Plan
from distributed_training.plan.topology import Topology
from distributed_training.run.prepare import write_plan
from distributed_training.run.ranks import Process
from distributed_training.run.saving import resume
from distributed_training.settings.errors import UserError

SHARED_WITHIN_S = 10.0  # in which a network disk shows a new folder to other machines


def check_disks(plan: Plan, process: Process) -> None:
    """See to it that all nodes have the run's folder: one that they share or, with
    shared_disk=False, each its own, and what it needs of the checkpoint to go on from. Raises
    UserError on every rank where that is not so. Collective.
    """
    leads = process.local_rank == 0
    if not plan.own_disks:
        with failing_together():
            if leads:
                _see_folder(process, plan)
        return
    mark = plan.run_dir / from_rank_0(f".disk-{uuid.uuid4().hex}")
    try:
        with failing_together():
            if leads:
                _make_folder(process, plan, mark)
    finally:
        if leads:
            mark.unlink(missing_ok=True)
    if plan.checkpoint is not None:
        mine = resume.read_meta(plan.checkpoint) if process.rank == 0 else None
        host, values = from_rank_0((socket.gethostname(), mine and mine.model_dump()))
        meta = resume.Meta(**values)
        meta.hosts = meta.hosts or dict.fromkeys(meta.files, host)
        with failing_together():
            if leads and process.rank:  # where the run was planned they have been read
                resume.check_files(plan.checkpoint, meta, plan, process.rank)


def _see_folder(process: Process, plan: Plan) -> None:
    """Checkpoints of all nodes lie in one folder, which rank 0 has made, with the plan in it."""
    who = f"rank {process.rank} on {socket.gethostname()}"
    fix = "set output_dir to a folder on a disk that all nodes share, or shared_disk to False"
    end = time.monotonic() + SHARED_WITHIN_S
    while not (plan.run_dir / PLAN_FILE).is_file():
        if time.monotonic() > end:
            what = f"{who} does not see {plan.run_dir}, which rank 0 has made"
            raise UserError(what, "a run is saved into one folder", fix)
        time.sleep(0.2)


def _make_folder(process: Process, plan: Plan, mark: Path) -> None:
    """This node's folder of the run, with the plan in it."""
    who = f"rank {process.rank} on {socket.gethostname()}"
    try:
        plan.run_dir.mkdir(parents=True, exist_ok=True)
        mark.touch(exist_ok=False)  # the first of those that share a disk succeeds, on any disk
        if process.rank:
            write_plan(plan)
    except FileExistsError:
        what = f"{who} sees another node's {plan.run_dir}"
        raise UserError(what, "with shared_disk=False each has its own", "set it to True") from None
    except OSError as error:
        what = f"{who} cannot make {plan.run_dir}"
        raise UserError(what, str(error.strerror), "set output_dir elsewhere") from None


def copies_here(held: Iterable[Part], topology: Topology) -> list[Part]:
    """This rank's share of what the ranks of its node hold and none of them writes, to be written
    under other names. Collective."""
    own: dict[str, Part] = {}
    for part in held:  # both ends of a V hold the tied embedding
        key = f"{part.name} {part.start} {part.size}"
        own[key] = part if part.writes else own.get(key, part)
    node = topology.rank - topology.local_rank
    ranks = gather((node, {key: part.writes for key, part in own.items()}))
    here = {rank: found for rank, (its, found) in enumerate(ranks) if its == node}
    written = {key for found in here.values() for key, writes in found.items() if writes}
    lacking = dict.fromkeys(key for found in here.values() for key in found if key not in written)
    mine = []
    for number, key in enumerate(lacking):
        holders = [rank for rank, found in here.items() if key in found]
        if holders[number % len(holders)] == topology.rank:
            mine.append(replace(own[key], name=COPY + own[key].name, writes=True))
    return mine
