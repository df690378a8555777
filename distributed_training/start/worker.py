"""What one process of a run does: build what the plan says, train, record; or fail, said once."""

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
from distributed_training.parallel.mesh import limit_channels, process_group
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
    """This process's part of a run; returns the exit code. Where torchrun or deepspeed was typed
    only CONFIG is `given`: rank 0 plans for all. Collective."""
    num_gpus = given.machine.num_gpus if isinstance(given, Plan) else torch.cuda.device_count()
    config = given.config if isinstance(given, Plan) else given
    watch = Watch(process)
    process, device, store = join(process, num_gpus, config.rendezvous_timeout_s)
    limit_channels(config.gradient_compression)
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
        # Training saves at Ctrl-C. Before and after it the run just ends, at once: libraries make
        # something else of a KeyboardInterrupt, such as a checkpoint that cannot be read.
        leave = functools.partial(end_failed, given, topology, KeyboardInterrupt(), store)
        with handling({signal.SIGINT: lambda *_: leave()}):
            try:
                code = training.train(given, topology, watch, ask, startup)
            except BaseException as error:  # others may wait in a collective that never completes
                if watch.activity == THE_END and records.has_finished(given.run_dir):
                    what = f"{type(error).__name__}: {error}"
                    print(f"note: after the run had finished, {what}", file=sys.stderr, flush=True)
                    os._exit(0)
                end_failed(given, topology, error, store)
    watch.end()  # once nobody can be waited for any more
    if code == 0 and given.config.push is not None and process.rank == 0:
        return training.push(given.run_dir, given.config.push)
    return code


def join(
    process: Process, num_gpus: int, limit_s: float
) -> tuple[Process, torch.device, dist.Store]:
    """Open the run's store; return this process with its local numbers, and its device. A device
    that cannot be used is an error before anybody is waited for, if the launcher told its number.
    Collective."""
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
    """The one that all processes share, as `meet` gives it; a process alone has nobody to meet."""
    if process.world_size > 1:
        return rendezvous.meet(process, limit_s)
    rendezvous.use_loopback()  # gloo and NCCL listen all the same
    return dist.HashStore()


def prepare(num_gpus: int, process: Process) -> torch.device:
    """Settings of libraries, and the device of this process. Raises UserError where torch cannot
    use the machine's GPUs or there are too few."""
    # Libraries that call each other's deprecated functions are not the user's business.
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
    # DeepSpeed's builder cannot read entries such as 9.0a; this machine's own is enough.
    major, minor = torch.cuda.get_device_capability(process.local_rank)
    os.environ["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"
    return torch.device("cuda", process.local_rank)


def use_cpu() -> torch.device:
    """The device, once libraries know that there is no other."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Else it says that there is CUDA's compiler but no GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    return torch.device("cpu")


def warm_up(process: Process) -> None:
    """What takes seconds and needs no plan: the GPU's context, the compiler and its processes."""
    if torch.cuda.is_available() and process.local_rank < torch.cuda.device_count():
        torch.zeros((), device=torch.device("cuda", process.local_rank))
        importlib.import_module("torch._inductor.compile_fx")
