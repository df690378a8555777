"""Starting processes: what a launcher told this one, and torchrun where several are asked for.

The only module that reads the environment for launch settings. No torch import.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed_training.plan.machine import Machine
from distributed_training.plan.plan import Plan
from distributed_training.records.record import RECORD_FILE, load_state, mark_stopped
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import shown

TORCHRUN = Path(__file__).with_name("torchrun.py")
KILLED_FILE = ".killed"  # its note, in the run's folder
CPU_PROCESSES = 2  # what "--num_gpus all" means without GPUs, or the next number that fits the mesh


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """What a launcher told this process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def current_process(environment: Mapping[str, str]) -> Process | None:
    """What torchrun or deepspeed set for this process; None when no launcher started it."""
    if "RANK" not in environment:
        return None
    # torchrun says LOCAL_WORLD_SIZE, deepspeed LOCAL_SIZE
    here = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE")
    try:
        return Process(
            rank=int(environment["RANK"]),
            world_size=int(environment["WORLD_SIZE"]),
            local_rank=int(environment["LOCAL_RANK"]),
            local_world_size=int(here or environment["WORLD_SIZE"]),
        )
    except (KeyError, ValueError) as error:
        fix = "start with torchrun or deepspeed, or unset RANK"
        what = "RANK is set but WORLD_SIZE or LOCAL_RANK is not a number"
        raise UserError(what, str(error), fix) from None


def requested_processes(num_gpus: str | None, machine: Machine, mesh: Mapping[str, int]) -> int:
    """The number that `--num_gpus` asks for; 1 when it was not given."""
    if num_gpus is None:
        return 1
    if num_gpus == "all":
        fixed = math.prod(size for size in mesh.values() if size > 0)
        return machine.num_gpus or fixed * -(-CPU_PROCESSES // fixed)
    if not num_gpus.isdecimal() or int(num_gpus) == 0:
        raise UserError(f"--num_gpus {shown(num_gpus)} is not a positive number or all")
    return int(num_gpus)


def check_world_size(num_gpus: str | None, process: Process) -> None:
    """Raise UserError when the launcher started another number of processes than asked for."""
    if num_gpus not in (None, "all", str(process.world_size)):
        raise UserError(
            f"--num_gpus {num_gpus} was asked for but the launcher started {process.world_size}",
            fix="give the number to the launcher only",
        )


def single_process() -> Process:
    """Set what process groups ask the environment for, as a launcher of one process would."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    return Process(rank=0, world_size=1, local_rank=0, local_world_size=1)


def prepare_environment(processes_here: int) -> None:
    """Settings that libraries read from the environment, for this process and its children."""
    # Extensions are built with ninja, which lies beside this Python even if not activated.
    folder, path = str(Path(sys.executable).parent), os.environ.get("PATH", "")
    if folder not in path.split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([folder, path])
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_process(processes_here)))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


def threads_per_process(processes_here: int) -> int:
    """An equal share of the cores, at least one."""
    return max(1, len(os.sched_getaffinity(0)) // processes_here)


def launch_command(plan: Plan, script: str) -> list[str]:
    """The command that starts the plan's processes.

    torchrun for every strategy: unlike DeepSpeed's launcher it leaves CUDA_VISIBLE_DEVICES alone
    and gives a process that is told to stop the time to save.
    """
    torchrun = [sys.executable, str(TORCHRUN), str(plan.run_dir / KILLED_FILE), *_options(plan)]
    return [*torchrun, script, "--run_dir", str(plan.run_dir)]


def typed_command(plan: Plan, script: str, arguments: Sequence[str]) -> str:
    """What a person would type to start the same processes."""
    launcher = ["torchrun", *_options(plan)] if plan.num_processes > 1 else ["python"]
    return shlex.join([*launcher, os.path.relpath(script), *arguments])


def _options(plan: Plan) -> list[str]:
    return ["--standalone", f"--nproc_per_node={plan.num_processes}"]


@contextlib.contextmanager
def stop_signals(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """`handler` gets SIGINT and SIGTERM meanwhile."""
    previous = {s: signal.signal(s, handler) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, before in previous.items():
            signal.signal(signum, before)


def spawn(command: list[str], plan: Plan) -> int:
    """Start the launcher, pass signals on, wait; return the run's exit code.

    A process that was killed could not write its own end: it is recorded here.
    """
    file, note = plan.run_dir / RECORD_FILE, plan.run_dir / KILLED_FILE
    before = file.stat().st_mtime_ns if file.is_file() else None
    note.unlink(missing_ok=True)
    signals: list[int] = []
    child = subprocess.Popen(command)

    def on_signal(signum: int, _frame: Any) -> None:
        signals.append(signum)
        if signum == signal.SIGTERM:  # Ctrl-C reaches the whole foreground group by itself
            child.send_signal(signum)

    with stop_signals(on_signal):
        code = child.wait()
    if plan.offload_dir is not None:  # a run that failed could not remove its files
        shutil.rmtree(plan.offload_dir, ignore_errors=True)
    if not file.is_file() or file.stat().st_mtime_ns == before:  # it did not come to a record
        return code if code >= 0 else 128 - code
    if signals:
        mark_stopped(plan.run_dir, "interrupted", signal.Signals(signals[0]).name)
    if note.is_file():
        mark_stopped(plan.run_dir, "failed", note.read_text(encoding="utf-8"))
        note.unlink()
    unknown = f"a process ended without a message (exit code {code}; -9 is most often memory)"
    mark_stopped(plan.run_dir, "failed", unknown, consequence=True)
    state = load_state(plan.run_dir)
    if state.status in ("oom", "failed"):
        print(f"{state.status}: {state.error}", file=sys.stderr)
        return 1
    stopped_by = signals[0] if signals else signal.SIGINT
    return 128 + stopped_by if state.status == "interrupted" else code


def free_port() -> int:
    """A TCP port that nobody listens on at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
