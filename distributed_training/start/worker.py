"""Run one process's part of a run: connect, train and record, or fail with one message."""

import functools
import importlib
import logging
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
from distributed_training.settings.config import Request
from distributed_training.settings.errors import UserError
from distributed_training.settings.machine import threads_per_process
from distributed_training.start import rendezvous
from distributed_training.start.ranks import current_process
from distributed_training.supervise.ending import end_failed
from distributed_training.supervise.process import Process, Startup, handling
from distributed_training.supervise.watch import THE_END, Watch
from distributed_training.train import worker as training
from distributed_training.train.build import build_topology


def run(given: Plan | Request, process: Process, startup: Startup) -> int:
    """Run this process's part of a run and return the exit code. If another launcher started it,
    only CONFIG is `given`, and rank 0 plans for all. Collective."""
    num_gpus = given.machine.num_gpus if isinstance(given, Plan) else torch.cuda.device_count()
    config = given.config if isinstance(given, Plan) else given
    watch = Watch(process)
    process, device, store = join(process, num_gpus, config.rendezvous_timeout_s)
    set_nccl_variables(config.strategy)
    with process_group(device, store):
        ask = agree.gather_in(store, process.rank, process.world_size)
        if isinstance(given, Request):
            given = rendezvous.agree_on_plan(given, process, ask, rendezvous.current_agent())
            rendezvous.check_disks(given, process)
            prepare(given.machine.num_gpus, process)  # a torch without CUDA sees no GPU
            startup.end("plan")
        topology = build_topology(given, process, device)
        if given.strategy.steps_on_host:  # torchrun by itself gives each process one thread
            torch.set_num_threads(threads_per_process(process.local_world_size))
        watch.begin(given.run_dir, given.config, store)
        # Training saves at Ctrl-C. Before and after it, the run ends at once. Libraries would turn
        # a KeyboardInterrupt into something else, such as a checkpoint that cannot be read.
        leave = functools.partial(end_failed, given, topology, KeyboardInterrupt(), store)
        with handling({signal.SIGINT: lambda *_: leave()}):
            try:
                code = training.train(given, topology, watch, ask, startup)
            except BaseException as error:  # other ranks may wait in a collective forever
                if watch.activity == THE_END and records.has_finished(given.run_dir):
                    what = f"{type(error).__name__}: {error}"
                    print(f"note: after the run had finished, {what}", file=sys.stderr, flush=True)
                    os._exit(0)
                end_failed(given, topology, error, store)
    watch.end()  # no rank waits for another any more
    if code == 0 and given.config.push is not None and process.rank == 0:
        return training.push(given.run_dir, given.config.push)
    return code


def join(
    process: Process, num_gpus: int, limit_s: float
) -> tuple[Process, torch.device, dist.Store]:
    """Open the run's store. Return this process with its local numbers, its device and the
    store. If the launcher set the local numbers, the device is checked before waiting for other
    ranks. Collective."""
    located = process.local_world_size > 0
    try:
        device = prepare(num_gpus, process) if located else torch.device("cpu")
    except UserError as error:
        # The command line prints rank 0's; another machine may have other GPUs.
        if process.rank and not process.local_rank:
            print(f"error: {error}", file=sys.stderr, flush=True)
        raise
    store = open_store(process, limit_s)
    if not located:
        process = current_process() or process
        device = prepare(num_gpus, process)
    return process, device, store


def open_store(process: Process, limit_s: float) -> dist.Store:
    """Return the store that all ranks share. A single process needs no rendezvous."""
    if process.world_size > 1:
        return rendezvous.meet(process, limit_s)
    rendezvous.use_loopback()  # gloo and NCCL still listen
    return dist.HashStore()


def prepare(num_gpus: int, process: Process) -> torch.device:
    """Set up libraries and return this process's device. Raises UserError if torch cannot use the
    machine's GPUs or there are too few."""
    # Users cannot fix libraries that call deprecated functions of each other.
    ours = "torch|deepspeed|distributed_training"
    warnings.filterwarnings("ignore", category=FutureWarning, module=ours)
    if not num_gpus:
        return use_cpu()
    if not torch.cuda.is_available():
        what = f"the installed torch {torch.__version__} cannot use this machine's GPU"
        fix = "install a build that matches the driver, or hide the GPU: CUDA_VISIBLE_DEVICES=''"
        raise UserError(what, f"it was built for CUDA {torch.version.cuda}", fix)
    here = process.local_world_size
    gpus = torch.cuda.device_count()
    if here > gpus:
        what = f"{here} processes on a machine with {gpus} GPUs that each can use"
        fix = f"start {gpus}; under srun, let each see all of its node's: --gpus-per-node, not "
        raise UserError(what, fix=f"{fix}--gpus-per-task")
    # DeepSpeed's builder cannot read entries such as 9.0a. This machine's own is enough.
    major, minor = torch.cuda.get_device_capability(process.local_rank)
    os.environ["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"
    return torch.device("cuda", process.local_rank)


def use_cpu() -> torch.device:
    """Tell libraries that there is no GPU, and return the CPU device."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Otherwise it prints that there is a CUDA compiler but no GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    return torch.device("cpu")


def warm_up(process: Process) -> None:
    """Do the slow parts of a start that need no plan: the GPU's context and torch's compiler."""
    if torch.cuda.is_available() and process.local_rank < torch.cuda.device_count():
        torch.zeros((), device=torch.device("cuda", process.local_rank))
        importlib.import_module("torch._inductor.compile_fx")
