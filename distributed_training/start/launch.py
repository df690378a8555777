"""Start a run in one of two ways. Without a launcher, this process plans the run and starts the
other processes, which read plan.json. Under a launcher, rank 0 plans the run and sends the plan to
the other ranks (see rendezvous.py).

This module itself does not import torch. `import_worker` imports it."""

import gc
import importlib
import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

from distributed_training.plan.plan import Plan, load_plan
from distributed_training.planner.data import read_data
from distributed_training.planner.make_plan import make_plan
from distributed_training.planner.rank import layout_name
from distributed_training.predict.memory import estimate_memory
from distributed_training.predict.predict import Cluster, local_cluster
from distributed_training.records.record import METRICS_FILE, RECORD_FILE, load_record, mark_stopped
from distributed_training.settings.config import AUTO, Request
from distributed_training.settings.errors import UserError, print_stderr, run_and_report_errors
from distributed_training.settings.files import shown
from distributed_training.settings.launchers import describe_ignored_settings
from distributed_training.settings.machine import Machine, detect_machine, threads_per_process
from distributed_training.settings.own_code import allow_code, allowed_code_folders
from distributed_training.settings.strategies import load_strategy
from distributed_training.start import run_dir
from distributed_training.start.ranks import (
    MAX_PROCESSES,
    OUT_OF_MEMORY,
    Command,
    Ranks,
    compute_in_fork,
    current_process,
    require_loopback,
    run_ranks,
    single_process,
    start_early,
)
from distributed_training.supervise.process import Process, Startup

# Maximum delay until this process notices that a rank was killed. A killed rank ends only after its
# GPU memory has been freed.
NOTICE_DELAY_S = 5.0
TRIAL_STEPS = 20  # after this many steps, a layout that "auto" chose is known to fit in memory
PLANNED_OPTION = "--planned"  # option that this command passes to the ranks that it starts
CPU_PROCESSES = 2  # minimum number of processes for "--num_gpus all" without GPUs


def launched_process(precision: str, num_gpus: str | None) -> Process | None:
    """Return the ranks and world sizes that a launcher set for this process. Return None if no
    launcher started this process. Print a note about launcher settings that have no effect. Raises
    UserError if `num_gpus`, the value of --num_gpus, contradicts the launcher."""
    process = current_process()
    ignored_settings = describe_ignored_settings(os.environ, precision)
    if ignored_settings and (process is None or process.rank == 0):
        print_stderr(f"note: {ignored_settings}")
    if process is not None and num_gpus not in (None, "all", str(process.world_size)):
        what = f"--num_gpus is {num_gpus}, but the launcher started {process.world_size} processes"
        raise UserError(what, fix="leave out --num_gpus, or pass this number to the launcher")
    return process


def requested_cluster(config: Request, num_gpus: str | None) -> Cluster:
    """Return a cluster that consists of this machine, with the number of processes requested by
    --num_gpus."""
    machine = detect_machine()
    mesh: Mapping[str, int] = {}  # empty: the number of processes need not fit a mesh
    if num_gpus == "all" and not machine.num_gpus and config.strategy != AUTO:
        mesh = load_strategy(config).mesh
    count = requested_processes(num_gpus, machine, mesh)
    return local_cluster(machine, count, count)


def start(request: Request, cluster: Cluster, script: Path, max_restarts: int) -> int:
    """Plan the run, write plan.json, and execute the plan in this process or in new processes.
    Return the run's exit code."""
    startup = Startup()
    require_loopback()
    machine = cluster.machine
    count = cluster.num_processes
    if count == 1 and machine.num_gpus > 1:
        print(
            f"note: this run uses 1 of {machine.num_gpus} GPUs. "
            "To use all GPUs, add --num_gpus all."
        )
    is_auto = AUTO in (request.strategy, request.batch_size)
    if count == 1 and not max_restarts and not (is_auto and machine.num_gpus):
        plan = plan_run(request, cluster)
        startup.end("plan")
        return run_here(plan, single_process(), startup)
    prepare_environment(count)
    command: Command | Callable[[Path], int]
    started_ranks: Ranks = ()
    if can_fork(machine):
        plan, command = _plan_before_forks(request, cluster, startup)
    else:
        command = [str(script), PLANNED_OPTION]
        # The processes import torch during planning, unless there are more processes than GPUs.
        with start_early(command, count if count <= machine.num_gpus else 0) as started_ranks:
            plan = plan_run(request, cluster)
    code = spawn(plan, command, max_restarts, started_ranks)
    # If a layout that "auto" chose runs out of memory, try a layout that is predicted to need less.
    while is_auto and plan.checkpoint is None and ran_out_of_memory_early(plan.run_dir):
        plan = _plan_smaller(plan, request, cluster)
        code = spawn(plan, command, max_restarts)
    return code


def plan_run(request: Request, cluster: Cluster) -> Plan:
    """Plan a run, write the plan into the run's folder, and return the plan."""
    plan = make_plan(request, cluster, read_data)
    return run_dir.reserve_run_dir(plan)


def _plan_before_forks(
    config: Request, cluster: Cluster, startup: Startup
) -> tuple[Plan, Callable[[Path], int]]:
    """Plan the run in a separate process while this process imports torch. Return the plan and the
    function that each forked rank calls. This process must not plan the run itself, because
    tokenizers start threads, and forking a process with threads is not safe."""
    wait_for_plan = compute_in_fork(
        lambda: run_dir.plan_as_text(lambda: make_plan(config, cluster, read_data))
    )
    worker = import_worker()
    startup.end("import")
    plan = run_dir.reserve_run_dir(run_dir.plan_from_text(wait_for_plan()))
    worker.use_cpu()
    plan.strategy.load_engine()  # import it before the ranks are forked
    startup.end("plan")
    return plan, partial(train_in_fork, worker, startup.seconds)


def _plan_smaller(failed_plan: Plan, config: Request, cluster: Cluster) -> Plan:
    """Plan the run again with a layout that is predicted to need less memory than the failed
    layout."""
    what = f"{layout_name(failed_plan)} with batch_size={failed_plan.config.batch_size}"
    cluster = replace(cluster, max_gpu_bytes=estimate_memory(failed_plan).needed_bytes)
    plan = plan_run(config, cluster)
    smaller = f"{layout_name(plan)} with batch_size={plan.config.batch_size}"
    print(f"note: {what} ran out of memory. Restarting with {smaller}", flush=True)
    return plan


def can_fork(machine: Machine) -> bool:
    """Return whether ranks may be started by forking. CUDA does not survive a fork, and importing
    DeepSpeed may initialize CUDA."""
    return not machine.num_gpus


def train_in_fork(worker: ModuleType, startup_s: Mapping[str, float], run_dir: Path) -> int:
    """Run this rank's part of the plan in a forked process, which reuses the imports of the
    launching process. Return the exit code."""
    process = current_process()
    assert process is not None
    return run_and_report_errors(
        partial(worker.run, load_plan(run_dir), process, Startup(startup_s))
    )


def ran_out_of_memory_early(run_dir: Path) -> bool:
    """Return whether a run ran out of GPU memory within its first TRIAL_STEPS steps."""
    if not (run_dir / RECORD_FILE).is_file() or load_record(run_dir).status != "oom":
        return False
    metrics = run_dir / METRICS_FILE
    return not metrics.is_file() or metrics.read_bytes().count(b"\n") <= TRIAL_STEPS


def run_planned_rank() -> int:
    """Run this process's part of a plan that the launching process is still making. The first line
    of standard input contains the run's folder and the folders whose Python code this process may
    execute."""
    process = current_process()
    assert process is not None
    worker = import_worker()
    startup = Startup()
    worker.warm_up(process)
    startup.end("import")
    line = sys.stdin.readline()
    if not line:  # the launching process was killed
        return 1
    run_dir, folders = json.loads(line)
    for folder in folders:
        allow_code(Path(folder))
    plan = load_plan(Path(run_dir))
    startup.end("plan")
    code = worker.run(plan, process, startup)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a normal exit takes seconds, because torch shuts down its compile workers


def run_here(plan_or_request: Plan | Request, process: Process, startup: Startup) -> int:
    """Import torch and run this process's part of the run. Return the exit code."""
    prepare_environment(process.local_world_size or process.world_size)
    worker = import_worker()
    startup.end("import")
    return worker.run(plan_or_request, process, startup)


def import_worker() -> ModuleType:
    """Import and return the worker module, which imports torch. `prepare_environment` must be
    called first, in this process or in the launching process."""
    gc.disable()  # garbage collection would traverse the modules many times during the import
    worker = importlib.import_module("distributed_training.start.worker")
    gc.freeze()
    gc.enable()
    return worker


def requested_processes(num_gpus: str | None, machine: Machine, mesh: Mapping[str, int]) -> int:
    """Return the number of processes that `--num_gpus` requests, or 1 if it is not set."""
    if num_gpus == "all":
        mesh_size = math.prod(size for size in mesh.values() if size > 0)
        return machine.num_gpus or mesh_size * -(-CPU_PROCESSES // mesh_size)
    if num_gpus is not None and (not num_gpus.isdecimal() or int(num_gpus) == 0):
        what = f"--num_gpus {shown(num_gpus)} is not accepted"
        raise UserError(what, 'it must be a whole number >= 1 or "all"')
    if num_gpus is not None and int(num_gpus) > MAX_PROCESSES:
        raise UserError(f"--num_gpus {num_gpus} is more than the maximum of {MAX_PROCESSES:,}")
    return int(num_gpus or 1)


def prepare_environment(processes_here: int) -> None:
    """Set environment variables that libraries read in this process and in its child processes."""
    # Extensions are built with ninja, which is in the same folder as this Python. That folder is
    # not on PATH if the virtual environment is not activated.
    folder = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", "")
    if folder not in path.split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([folder, path])
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_process(processes_here)))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    # Without expandable segments, fragmentation wastes up to 10 GiB of GPU memory with an 8B model.
    if "PYTORCH_ALLOC_CONF" not in os.environ:  # newer name of PYTORCH_CUDA_ALLOC_CONF
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def spawn(
    plan: Plan,
    program: Command | Callable[[Path], int],
    max_restarts: int,
    started_ranks: Ranks = (),
) -> int:
    """Start the plan's processes, or use the processes in `started_ranks`, and wait for them. If a
    process fails, restart all processes, up to `max_restarts` times. Return the run's exit code. If
    a process was killed, record the cause."""
    if callable(program):
        program = partial(program, plan.run_dir)
    file = plan.run_dir / RECORD_FILE
    modified_before = file.stat().st_mtime_ns if file.is_file() else None
    stdin_line = json.dumps([str(plan.run_dir), allowed_code_folders()])
    outcome = run_ranks(program, plan.num_processes, started_ranks, stdin_line)
    notes = plan.notes
    for count in range(1, max_restarts + 1):
        if outcome.signum or not any(outcome.codes.values()):
            break
        checkpoint, note = run_dir.plan_restart(plan, f" ({count})")
        plan = replace(plan, checkpoint=checkpoint, notes=(*notes, note))
        run_dir.write_plan(plan)
        outcome = run_ranks(program, plan.num_processes, stdin_line=stdin_line)
    if plan.offload_dir is not None:  # a failed run cannot remove its own files
        shutil.rmtree(plan.offload_dir, ignore_errors=True)
    code = outcome.exit_code
    reason = outcome.reason
    # If the record is missing or unchanged, no rank wrote it in this attempt.
    if not file.is_file() or file.stat().st_mtime_ns == modified_before:
        if reason and not outcome.signum:
            print_stderr(f"failed before training began: {reason}")
        return code
    # mark_stopped keeps a cause that the record already has. Peers of a killed process may have
    # failed before its end was noticed here.
    status = "interrupted" if outcome.signum else "failed"
    cause = reason or outcome.early_exits
    error = cause or "a process ended without an error message"
    ago_s = NOTICE_DELAY_S if min(outcome.codes.values(), default=0) < 0 else 0.0
    mark_stopped(plan.run_dir, status, error, consequence=not cause, ago_s=ago_s)
    record = load_record(plan.run_dir)
    if record.status in ("oom", "failed"):
        print_stderr(f"{record.status}: {record.error}")
        return 1
    if record.status == "interrupted" and code < 128:  # only the child processes received a signal
        return 128 + signal.SIGINT
    # The run had finished, and there was no upload to the Hub that could fail.
    if record.status == "ok" and code and not outcome.signum and plan.config.push is None:
        # If a rank hangs after the end of training, another rank's watch kills it.
        what = reason.removesuffix(OUT_OF_MEMORY) or "a process ended with an error"
        print_stderr(f"note: after the run had finished: {what}")
        return 0
    return code
