"""Start a run in one of two ways. Without a launcher, this process plans the run, then starts and
watches the other processes, which read plan.json. Under a launcher, rank 0 plans the run and sends
the plan to the other ranks (see launched.py).

This module itself does not import torch. `import_with_torch` imports it."""

import gc
import importlib
import os
import shutil
import signal
import sys
from pathlib import Path
from types import ModuleType

from distributed_training.plan.plan import Plan, load_plan
from distributed_training.planner.data import read_data
from distributed_training.planner.make_plan import make_plan
from distributed_training.predict.predict import Cluster
from distributed_training.records.record import has_begun, load_record, mark_stopped
from distributed_training.settings.config import Request
from distributed_training.settings.detect import threads_per_process
from distributed_training.settings.errors import UserError, print_stderr
from distributed_training.settings.launchers import PLANNED_OPTION
from distributed_training.start import run_dir
from distributed_training.start.progress import Monitor
from distributed_training.start.ranks import Command, current_process, run_ranks, single_process
from distributed_training.supervise.process import Process


def launched_process(num_gpus: str | None) -> Process | None:
    """Return the ranks and world sizes that a launcher set for this process. Return None if no
    launcher started this process. Raises
    UserError if `num_gpus`, the value of --num_gpus, contradicts the launcher."""
    process = current_process()
    if process is None:
        return None
    if "ACCELERATE_DEEPSPEED_CONFIG_FILE" in os.environ:
        fix = "remove it from accelerate's settings, and add --deepspeed_config FILE"
        raise UserError("accelerate's deepspeed_config_file is not used", fix=fix)
    if num_gpus not in (None, "all", str(process.world_size)):
        what = f"--num_gpus is {num_gpus}, but the launcher started {process.world_size} processes"
        raise UserError(what, fix="leave out --num_gpus, or pass this number to the launcher")
    return process


def start(request: Request, cluster: Cluster, script: Path) -> int:
    """Plan the run, write plan.json, and execute the plan in this process or in new processes.
    Return the run's exit code."""
    machine = cluster.machine
    count = cluster.num_processes
    if count == 1 and machine.num_gpus > 1:
        print(
            f"note: this run uses 1 of {machine.num_gpus} GPUs. "
            "To use all GPUs, add --num_gpus all."
        )
    plan = run_dir.reserve_run_dir(make_plan(request, cluster, read_data))
    prepare_environment(count)
    if count == 1:
        return run_rank(plan, single_process())
    return spawn(plan, [str(script), PLANNED_OPTION])


def run_planned_rank(run_dir: str) -> int:
    """Run this process's part of the plan in `run_dir`, which the launching process passes on the
    command line."""
    process = current_process()
    assert process is not None
    # A normal exit takes seconds, because torch shuts down its compile workers.
    os._exit(run_rank(load_plan(Path(run_dir)), process))


def run_rank(plan: Plan, process: Process) -> int:
    """Run this process's part of the plan. Return the exit code."""
    worker = import_with_torch("worker")
    store = worker.open_store(process, plan.config.rendezvous_timeout_s)
    return int(worker.run(plan, process, store))


def run_launched(request: Request, process: Process) -> int:
    """Run this process's part of a run that another launcher started. Return the exit code."""
    prepare_environment(process.local_world_size)
    return int(import_with_torch("launched").run(request, process))


def import_with_torch(name: str) -> ModuleType:
    """Import and return a module of start/ that imports torch. `prepare_environment` must be called
    first, in this process or in the launching process."""
    gc.disable()  # garbage collection would traverse the modules many times during the import
    module = importlib.import_module(f"distributed_training.start.{name}")
    gc.freeze()
    gc.enable()
    return module


def prepare_environment(processes_here: int) -> None:
    """Set environment variables that libraries read in this process and in its child processes."""
    # Extensions are built with ninja, which is in the same folder as this Python. That folder is
    # not on PATH if the virtual environment is not activated.
    folder = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", "")
    if folder not in path.split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([folder, path])
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_process(processes_here)))
    # Without expandable segments, fragmentation wastes up to 10 GiB of GPU memory with an 8B model.
    if "PYTORCH_ALLOC_CONF" not in os.environ:  # newer name of PYTORCH_CUDA_ALLOC_CONF
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def spawn(plan: Plan, command: Command) -> int:
    """Start processes that execute the plan, and wait for them. Return the run's exit code. If a
    process was killed or hangs, record the cause."""
    count = plan.num_processes
    rank_command = [*command, str(plan.run_dir)]
    outcome = run_ranks(rank_command, count, Monitor(plan.config, count))
    if plan.offload_dir is not None:  # a failed run cannot remove its own files
        shutil.rmtree(plan.offload_dir, ignore_errors=True)
    code = outcome.exit_code
    if not has_begun(plan.run_dir):
        if outcome.reason and not outcome.signum:
            print_stderr(f"failed before training began: {outcome.reason}")
        return code
    if code:
        mark_stopped(
            plan.run_dir,
            "interrupted" if outcome.signum else "failed",
            outcome.reason or "a process ended without an error message",
            consequence=not outcome.reason,
            # Peers of a killed process fail as well, perhaps before its end is noticed.
            decides=bool(outcome.hang) or -signal.SIGKILL in outcome.codes.values(),
        )
    record = load_record(plan.run_dir)
    if record.status in ("oom", "failed"):
        print_stderr(f"{record.status}: {record.error}")
    elif record.status == "ok" and code:
        reason = outcome.reason or "a process failed"
        print_stderr(f"note: after the run had finished: {reason}")
        return 0
    return code
