"""Start one process per stage, and terminate all processes if one fails. The processes are started
and terminated either by this module or by torchrun's agent. Each process reports its own failure. A
process that has only lost its connection to a neighbor waits briefly, so that the cause is reported
first."""

import gc
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from typing import NoReturn

from pipedream.errors import UserError

# Environment variable with the path of a file through which the processes of launch() find each
# other. A port would be open to all users of the machine.
STORE_ENV = "PIPEDREAM_STORE"
GRACE_S = 2.0
# Exit code if all processes succeed, but weights differ from one-process training
WEIGHTS_DIFFER = 3


class StageLostError(RuntimeError):
    """Error raised if another stage's process has ended or does not answer in time."""


def this_rank(environment: Mapping[str, str], num_stages: int) -> int | None:
    """Return this process's rank under launch() or torchrun. Return None if neither started it.
    Raises UserError if the number of processes is not `num_stages`, or if the processes run on
    several machines."""
    if "RANK" not in environment:
        return None
    names = "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"
    values = [environment.get(name, "") for name in names]
    if not all(map(str.isdecimal, values)):
        problem = f"RANK is set, but {', '.join(names)} are not all numbers"
        raise UserError(problem, "start with torchrun, or unset RANK")
    rank, world_size, local_size = map(int, values)
    if world_size != num_stages:
        raise UserError(
            f"{world_size} processes were started for num_stages={num_stages}",
            f"run torchrun --nproc_per_node={num_stages}, or --set num_stages={world_size}",
        )
    if local_size != world_size:
        raise UserError(
            f"{world_size} processes were started on more than one machine",
            "start all stages on one machine, because their times must come from one clock",
        )
    return rank


def launch(body: Callable[[int], None], num_stages: int) -> int:
    """Run `body` for each rank in a separate process, and return the exit code of the run.
    On Linux, the processes are forked and reuse this process's imports.

    The code is 0 if all processes succeed. If one fails, the others are terminated, and the last
    line on stderr names the stage and the error. The code is then 2 for a mistake that the user can
    fix, WEIGHTS_DIFFER if weights differ, and otherwise 1. The processes also end when this process
    ends. On Linux, they end even if this process is killed.
    """
    import torch.multiprocessing as mp

    for number in (signal.SIGINT, signal.SIGTERM):
        # Forks inherit these handlers and end on both signals.
        signal.signal(number, signal.SIG_DFL)
    # Otherwise torch logs a line for each process that it terminates.
    logging.getLogger(mp.spawn.__module__).setLevel(logging.ERROR)
    # Forks are safe on Linux. They reuse this process's imports.
    method = "fork" if sys.platform == "linux" else "spawn"
    gc.freeze()  # forks share the memory of imports; garbage collection would copy it
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _run_as_rank, (body, num_stages, folder), num_stages,
            join=False, daemon=True, start_method=method,
        )  # fmt: skip
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        try:
            while not context.join(grace_period=0.1):
                pass
        except mp.ProcessExitedException as ended:
            if ended.signal_name is not None:  # otherwise the process has printed why
                what = f"was killed by {ended.signal_name}"
                if ended.exit_code == -signal.SIGKILL:
                    what += ", possibly because memory ran out"
                print(
                    f"error: stage {ended.error_index} of {num_stages} (process {ended.error_pid}) "
                    f"{what}; the other stages were stopped",
                    file=sys.stderr,
                )
            return ended.exit_code if ended.exit_code in (2, WEIGHTS_DIFFER) else 1
        finally:
            for process in context.processes:
                process.kill()
    return 0


def _run_as_rank(rank: int, body: Callable[[int], None], num_stages: int, folder: str) -> NoReturn:
    """Set the environment variables that torchrun would set, and run `body`. This function runs in
    a new process."""
    os.setsid()  # Ctrl-C then reaches only the parent, which terminates this process
    size = str(num_stages)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ[STORE_ENV] = f"{folder}/store"
    run_worker(body, num_stages)


def run_worker(body: Callable[[int], None], num_stages: int) -> NoReturn:
    """Run `body` as one stage, print its exception if it raises one, and exit."""
    rank = int(os.environ["RANK"])
    code = 1
    message = None
    try:
        body(rank)
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except UserError as error:  # all ranks have the same error, and rank 0 prints it
        code = 2
        if rank:
            time.sleep(GRACE_S)
        else:
            message = str(error)
    except StageLostError as error:
        time.sleep(GRACE_S + 0.1 * rank)  # one rank prints it, and the others are terminated
        message = (
            f"stage {rank} of {num_stages} stopped: {error}. The other stages are being stopped"
        )
    except BaseException as error:
        traceback.print_exc()
        why = f"{type(error).__name__}: {error}"
        message = f"stage {rank} of {num_stages} failed: {why}. The other stages are being stopped"
    if message is not None:
        print("error:", " ".join(message.split()), file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    # sys.exit could wait forever for the backends' threads after an error.
    os._exit(code)
