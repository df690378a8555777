"""Run one process's part of a run. Connect to the other ranks and train. If an error occurs, record
and print its cause."""

import os
import signal
import sys
import warnings

import torch
import torch.distributed as dist

from distributed_training.parallel import agree
from distributed_training.parallel.mesh import process_group, set_nccl_variables
from distributed_training.plan.plan import Plan
from distributed_training.records import record as records
from distributed_training.settings.detect import threads_per_process
from distributed_training.settings.errors import UserError, print_stderr
from distributed_training.start import rendezvous
from distributed_training.start.progress import Progress, find_limit
from distributed_training.supervise import claims
from distributed_training.supervise.ending import end_failed
from distributed_training.supervise.process import (
    END_ACTIVITY,
    LAUNCHER_VARIABLE,
    STOP_SIGNALS,
    Process,
    end_with_parent,
    handle_signals,
)
from distributed_training.train.run import build_topology, stop_compilers, train


def run(plan: Plan, process: Process, store: dist.Store) -> int:
    """Run this process's part of a planned run and return the exit code. All ranks, which share
    `store`, must call this function."""
    report_fds = connect_launcher()[1:]
    progress = Progress(*report_fds)
    device = prepare_device(plan.machine.num_gpus, process)
    set_nccl_variables(has_pipeline=plan.mesh["pp"] > 1)
    limit_s = find_limit(plan.config, process.world_size)
    # Usually, the launching process decides that a rank hangs.
    timeout_s = limit_s if limit_s and not report_fds else agree.DAY_S
    with process_group(device, store, timeout_s=timeout_s):
        gather_values = agree.build_store_gather(store, process.rank, process.world_size)
        topology = build_topology(plan, process, device)
        if plan.strategy.steps_on_host:  # by default, torchrun gives each process one thread
            torch.set_num_threads(threads_per_process(process.local_world_size))
        # glibc then keeps freed blocks of up to 32 MiB. Otherwise, the kernel would clear the pages
        # of large tensors in each step again.
        bytes(2**25 - 2**14)
        claims.hold(plan.run_dir)
        progress.limit_s = limit_s

        # During training, these signals save a checkpoint. Before and after training, this handler
        # ends the run immediately. Otherwise, libraries would convert a KeyboardInterrupt into
        # another error, such as an unreadable checkpoint.
        def end_run(signum: int, _frame: object) -> None:
            stop_compilers(plan)
            interrupt = KeyboardInterrupt(signal.Signals(signum).name)
            end_failed(plan, topology, interrupt)

        with handle_signals(dict.fromkeys(STOP_SIGNALS, end_run)):
            try:
                code = train(plan, topology, progress.set_activity, gather_values)
            except BaseException as error:  # other ranks may wait in a collective forever
                # Launchers terminate all ranks after one has failed. This is not the cause.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                if progress.activity.name == END_ACTIVITY and records.has_finished(plan.run_dir):
                    what = f"{type(error).__name__}: {error}"
                    print_stderr(f"note: after the run had finished: {what}")
                    os._exit(0)
                end_failed(plan, topology, error)
    progress.set_activity("")
    return code


def connect_launcher() -> list[int]:
    """If our launching process started this process, let this process end with it, and return the
    descriptors of the files for the store and for this rank's reports. Otherwise, return []."""
    if LAUNCHER_VARIABLE not in os.environ:
        return []
    launcher, *fds = map(int, os.environ[LAUNCHER_VARIABLE].split())
    end_with_parent()
    if os.getppid() != launcher:  # it ended before the call
        sys.exit(128 + signal.SIGTERM)
    return fds


def open_store(process: Process, limit_s: float) -> dist.Store:
    """Return the store that all ranks share. A single process gets a local store, without a
    rendezvous."""
    if fds := connect_launcher():
        return dist.FileStore(f"/proc/self/fd/{fds[0]}", process.world_size)
    if process.world_size == 1:
        return dist.HashStore()
    return rendezvous.connect_ranks(process, limit_s)


def prepare_device(num_gpus: int, process: Process) -> torch.device:
    """Configure libraries and return this process's device. Raises UserError if torch cannot use
    the machine's GPUs or if there are fewer GPUs than local processes."""
    # Users cannot fix libraries that call each other's deprecated functions.
    modules = "torch|deepspeed|distributed_training"
    warnings.filterwarnings("ignore", "", FutureWarning, modules)
    if not num_gpus:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        return torch.device("cpu")
    if not torch.cuda.is_available():
        what = f"the installed torch {torch.__version__} cannot use this machine's GPU"
        fix = "install a build that matches the driver, or hide the GPU: CUDA_VISIBLE_DEVICES=''"
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
        raise UserError(what, f"it was built for {built}", fix)
    num_visible = torch.cuda.device_count()
    if process.local_world_size > num_visible:
        what = f"{process.local_world_size} processes run here, but each sees {num_visible} GPUs"
        fix = "start fewer. Under srun, use --gpus-per-node instead of --gpus-per-task"
        raise UserError(what, fix=fix)
    # DeepSpeed's extension builder cannot parse architectures such as 9.0a. The architecture of
    # this process's GPU is enough.
    major, minor = torch.cuda.get_device_capability(process.local_rank)
    os.environ["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"
    return torch.device("cuda", process.local_rank)
