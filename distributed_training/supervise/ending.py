"""How a run fails: why is recorded and printed, and the process leaves."""

import contextlib
import errno
import os
import shutil
import sys
import time
import traceback
from datetime import timedelta
from operator import itemgetter
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from distributed_training.parallel.mesh import Topology
from distributed_training.plan.plan import Plan
from distributed_training.records import record as records
from distributed_training.records.display import gib, pasteable, short_path
from distributed_training.records.folder import list_checkpoints, remove_unfinished
from distributed_training.settings.errors import RunError, UserError
from distributed_training.supervise import commands

# gloo's words and NCCL's where the process at the other end is gone.
SIGNS_OF_LOSS = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited",
)  # fmt: skip
# No room, none of one's quota, of one's limit; libraries say it in the system's words.
FULL = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)))
CAUSE = "cause of the end"  # a key of the store
CHUNK = 8192  # tokens of a loss, as measured (results/records/h200-nanogpt/variants.json)


def end_failed(plan: Plan, topology: Topology, error: BaseException, store: dist.Store) -> NoReturn:
    """Record and print what went wrong, then leave at once."""
    rank = f"rank {topology.rank}"
    if isinstance(error, RuntimeError) and str(error).lstrip().startswith("[Stage"):
        error = error.__cause__ or error  # torch says only which stage of a pipeline failed
    said = "".join(traceback.format_exception(error))  # with what it came from
    if found := next((sign for sign in FULL if sign in said), ""):
        # Once for each disk: what another process is still writing would fail otherwise.
        if (topology.local_rank if plan.own_disks else topology.rank) == 0:
            remove_unfinished(plan.run_dir)
        what = f"{rank}: the disk of {short_path(plan.run_dir)} is full"
        error = RunError(what, found, "make room, then go on with --resume auto")
    first_line = str(error).strip().partition("\n")[0]
    if not plan.run_dir.is_dir():
        what = f"{plan.run_dir} was removed or renamed while the run was going on"
        error = RunError(what, "checkpoints and metrics are written there", "start the run again")
        first_line = str(error)
    status = "failed"
    lost = isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS_OF_LOSS)
    each_finds_it = isinstance(error, (UserError, KeyboardInterrupt))
    reason = f"{rank}: {type(error).__name__}: {first_line}"
    if lost:
        reason = said = f"{rank} {records.LOST}: {first_line}"
    elif isinstance(error, UserError):
        reason = str(error)
        said = f"error: {error}"
    elif isinstance(error, torch.cuda.OutOfMemoryError):
        status = "oom"
        said = explain_out_of_memory(plan, topology, first_line)
    elif isinstance(error, KeyboardInterrupt):  # while it starts or ends: training itself saves
        status = "interrupted"
        said = "interrupted; nothing was trained"
        if list_checkpoints(plan.run_dir):
            words, command = commands.to_continue(plan)
            said = f"interrupted; {words}\n{pasteable(command)}"
    if plan.own_disks:  # what this node notes the others do not see
        with contextlib.suppress(RuntimeError):  # the store's process has ended
            if not lost:
                store.set(CAUSE, reason)
            else:
                store.wait([CAUSE], timedelta(seconds=2))
                reason = store.get(CAUSE).decode()
                said = f"{rank} {records.LOST}; {reason}"
                lost = False
    first = True
    try:
        try:
            first = records.mark_stopped(plan.run_dir, status, reason, consequence=lost)
        finally:  # even where the disk is full
            gone = not plan.run_dir.is_dir() and topology.rank > 0  # rank 0 says it
            if (first or not each_finds_it) and not gone:
                print(said.rstrip(), file=sys.stderr, flush=True)
        if status == "failed" and not (lost or each_finds_it):
            get_error_handler().record_exception(error)  # torchrun prints it last
        if not first:  # so that launchers see the other's end first, and it can print
            time.sleep(2)
        if plan.offload_dir is not None and topology.local_rank == 0:
            shutil.rmtree(plan.offload_dir, ignore_errors=True)
    finally:
        os._exit(130 if status == "interrupted" else getattr(error, "exit_code", 1))


def explain_out_of_memory(plan: Plan, topology: Topology, detail: str) -> str:
    """Where the memory went and what helps, most effective first."""
    config = plan.config
    micro = plan.batch.micro_batch_size
    peak = gib(torch.cuda.max_memory_allocated(topology.device))
    said = plan.prediction
    assert said is not None, "made with the plan"
    parts = sorted(said["memory_bytes"].items(), key=itemgetter(1), reverse=True)
    largest = ", ".join(f"{name} {gib(size)}" for name, size in parts[:3])
    fixes = {
        f"micro_batch_size={micro // 2} num_microbatches=auto (same work)": micro > 1,
        "activation_checkpointing=full": config.activation_checkpointing != "full",
        f"max_length={config.max_length // 2}": config.max_length > 128,
        f"loss_chunk_tokens={CHUNK}": micro * config.max_length > CHUNK
            and not config.loss_chunk_tokens and config.precision != "fp16",
        "strategy=zero3 or fsdp (they divide the state; activations stay)":
            topology.dp_size == topology.world_size > 1
            and not plan.uses_fsdp and plan.strategy.zero.stage < 3,
        "strategy=offload": not plan.strategy.steps_on_host,
    }  # fmt: skip
    helpful = "; --set ".join(fix for fix, helps in fixes.items() if helps)
    return (
        f"out of GPU memory on rank {topology.rank}: {detail}\n"
        f"  {peak} were in use at the peak; predicted were {gib(said['peak_bytes'])} a process "
        f"({largest}), {gib(said['host_bytes'])} of RAM\n"
        f"  in this order, try --set {helpful}"
    )
