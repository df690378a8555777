"""End a failed run: record and print the reason, and exit the process."""

import errno
import os
import shlex
import shutil
import signal
import time
import traceback
from typing import NoReturn

import torch

from distributed_training.parallel.mesh import Topology
from distributed_training.plan.plan import Plan
from distributed_training.records import record as records
from distributed_training.records.display import format_bytes, short_path
from distributed_training.records.folder import list_checkpoints, remove_unfinished
from distributed_training.settings.errors import (
    RunError,
    UserError,
    first_line,
    print_stderr,
    printable,
)
from distributed_training.supervise import claims
from distributed_training.supervise.process import LAUNCHER_VARIABLE

# Phrases in gloo and NCCL errors after the process at the other end of a connection has exited
LOST_CONNECTION_PHRASES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
)
DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def end_failed(plan: Plan, topology: Topology, error: BaseException) -> NoReturn:
    """Record and print the cause of the failure, then exit this process immediately. An error whose
    cause is not known by its type or error number is printed with its traceback."""
    rank = f"rank {topology.rank}"
    if isinstance(error, RuntimeError) and str(error).lstrip().startswith("[Stage"):
        error = error.__cause__ or error  # torch's wrapper only names the pipeline stage
    if isinstance(error, OSError) and error.errno in DISK_ERRNOS:
        if topology.local_rank == 0:
            remove_unfinished(plan.run_dir)
        what = f"{rank} could not write to {short_path(error.filename or plan.run_dir)}"
        fix = "free some space or raise the limit (ulimit -f), then continue with --resume auto"
        error = RunError(what, str(error.strerror), fix)
    if not plan.run_dir.is_dir():
        error = claims.build_removed_error(plan.run_dir)
    summary = first_line(error)
    status = "failed"
    code = getattr(error, "exit_code", 1)
    lost_connection = isinstance(error, RuntimeError) and any(
        phrase in str(error) for phrase in LOST_CONNECTION_PHRASES
    )
    is_on_all_ranks = isinstance(error, (UserError, KeyboardInterrupt))
    reason = f"{rank}: {type(error).__name__}: {summary}"
    message = "".join(traceback.format_exception(error))
    if lost_connection:
        reason = message = f"{rank} {records.LOST_PEER}: {summary}"
    elif isinstance(error, UserError):
        reason = str(error)
        message = error.terminal_text
    elif isinstance(error, torch.cuda.OutOfMemoryError):
        status = "oom"
        message = explain_out_of_memory(plan, topology, summary)
    # A signal outside the training loop, which handles signals itself
    elif isinstance(error, KeyboardInterrupt):
        status = "interrupted"
        reason = f"{rank}: {summary}"
        code = 128 + signal.Signals[summary]
        message = f"Stopped. {explain_continuing(plan)}"
    try:
        if is_on_all_ranks and topology.rank:
            time.sleep(2)  # rank 0 reports what all ranks raise
        is_first_cause = records.mark_stopped(
            plan.run_dir, status, reason, consequence=lost_connection
        )
        if is_first_cause or not is_on_all_ranks:
            print_stderr(message.rstrip())
        # Give the rank that failed first time to print, and launchers time to notice that rank.
        if not is_first_cause:
            time.sleep(2)
        if plan.offload_dir is not None and topology.local_rank == 0:
            shutil.rmtree(plan.offload_dir, ignore_errors=True)
    finally:
        os._exit(code)


def explain_out_of_memory(plan: Plan, topology: Topology, detail: str) -> str:
    """Describe the memory use of this rank, and suggest the planner's settings that reduce it.
    `detail` is the first line of PyTorch's error message."""
    peak = format_bytes(torch.cuda.max_memory_allocated(topology.device))
    return (
        f"Out of GPU memory on rank {topology.rank}: {detail}\n"
        f"  The peak was {peak} of allocated memory. The plan predicted "
        f"{format_bytes(plan.prediction['peak_bytes'])} per process.\n"
        f"  To need less, {plan.lighter_settings}."
    )


def explain_continuing(plan: Plan) -> str:
    """Return a sentence and the command that continues this run, or say that nothing was saved. If
    an external launcher started the run, return the option to add to the launcher's command
    instead."""
    if not list_checkpoints(plan.run_dir):
        return "Nothing was saved."
    option = shlex.join(["--resume", short_path(plan.run_dir)])
    if plan.num_processes > 1 and LAUNCHER_VARIABLE not in os.environ:
        return f"To continue, run the same command again and add:\n  {printable(option)}"
    words = shlex.split(plan.command)
    if "--resume" in words:
        place = words.index("--resume")
        del words[place : place + 2]
    return f"To continue, run:\n  {printable(shlex.join(words))} {option}"
