"""Start a run under somebody else's launcher, such as torchrun: rank 0 plans the run, and all ranks
receive the plan before they begin their part of it."""

import contextlib
import os
from pathlib import Path

import torch.distributed as dist

from distributed_training.parallel import agree
from distributed_training.plan.plan import PLAN_AS_JSON, PLAN_FILE, Plan, is_copy, load_plan
from distributed_training.planner.data import read_data
from distributed_training.planner.make_plan import make_plan
from distributed_training.predict.predict import local_cluster
from distributed_training.records.record import code_checksums, has_finished, versions
from distributed_training.settings.config import Request
from distributed_training.settings.detect import detect_machine
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import load_object
from distributed_training.start import rendezvous, run_dir, worker
from distributed_training.supervise.process import Process


def run(request: Request, process: Process) -> int:
    """Plan a run on rank 0 and run this process's part of it. Return the exit code. All ranks must
    call this function."""
    store = worker.open_store(process, request.rendezvous_timeout_s)
    # The run has values of its own, which must not have the same keys.
    planning_store = dist.PrefixStore("planning", store)
    gather_values = agree.build_store_gather(planning_store, process.rank, process.world_size)
    plan = agree_on_plan(request, process, gather_values)
    rendezvous.check_disks(plan, process, gather_values)
    return worker.run(plan, process, store)


def agree_on_plan(request: Request, process: Process, gather_values: agree.Gather) -> Plan:
    """Make the plan on rank 0 and return it on all ranks. If torchrun has restarted the processes
    of a run, the plan continues that run. All ranks raise rank 0's UserError. They also raise
    UserError if settings or code differ between ranks. All ranks must call this function."""
    settings = request.to_key_values()
    del settings["output_dir"]  # paths of checkouts may differ
    agree.check_ranks_agree({**settings, **versions(), **code_checksums()}, gather_values)

    text = ""
    with agree.raise_on_all_ranks(gather_values):
        if process.rank == 0:
            cluster = local_cluster(detect_machine(), process.world_size, process.local_world_size)
            continued_config, notes = continue_run(request)
            plan = make_plan(continued_config, cluster, read_data)
            text = PLAN_AS_JSON.dump_json(run_dir.reserve_run_dir(plan, notes)).decode()
    return PLAN_AS_JSON.validate_json(gather_values(text)[0])


def continue_run(request: Request) -> tuple[Request, list[str]]:
    """If this torchrun has already started a run that has not finished, return a copy of `request`
    that resumes the run's last checkpoint, and a list with a note. If there is no such run, or if
    it starts from the beginning, return `request` unchanged."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    folder = None
    for file in sorted(Path(request.output_dir).glob(f"*/{PLAN_FILE}")):
        with contextlib.suppress(UserError):  # a foreign or damaged file
            candidate = file.parent.resolve()
            is_same = load_object(file, "plan").get("run_id") == run_id != "none"
            if is_same and not is_copy(candidate):
                folder = candidate
    if folder is None or has_finished(folder):
        return request, []
    checkpoint, note = run_dir.plan_restart(load_plan(folder))
    if checkpoint:
        request = request.model_copy(update={"resume": str(checkpoint)})
    return request, [note]
