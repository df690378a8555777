"""Determine the rank of this process, and start and terminate the ranks on one machine. This module
does not import torch.

torchrun's agent is not used, because its store listens on every interface and unpickles incoming
data. Instead, rank 0 serves the store on a socket that is bound to loopback.

On GPUs, each rank is a new Python process, because CUDA does not survive a fork. On CPUs, the ranks
are forked from one process that has imported torch, because separate imports would occupy all cores
for several seconds."""

import contextlib
import ctypes
import functools
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from distributed_training.settings.errors import RunError, UserError, print_stderr
from distributed_training.settings.files import shown
from distributed_training.settings.launchers import (
    find_launcher,
    find_num_nodes,
    find_uncounted_rank,
)
from distributed_training.settings.machine import threads_per_process
from distributed_training.supervise.process import (
    LAUNCHER_PID_VARIABLE,
    STOP_SIGNALS,
    Process,
    format_numbers,
    handle_signals,
)

LOOPBACK = "127.0.0.1"
STORE_SOCKET = "RANKS_STORE_SOCKET"  # environment variable that contains rank 0's file descriptor

# Seconds from a stop signal until the ranks are killed. torchrun uses the same variable and
# default. FAILURE_TIMEOUT_S applies after a rank has failed.
SHUTDOWN_TIMEOUT_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
SHUTDOWN_TIMEOUT_S = 30.0
FAILURE_TIMEOUT_S = 10.0
# After a rank has ended without an error, the other ranks are terminated if they use no CPU time
# for this many seconds. STOPPED_TIMEOUT_S applies if a rank is stopped (SIGSTOP), otherwise
# IDLE_TIMEOUT_S.
STOPPED_TIMEOUT_S = 30.0
IDLE_TIMEOUT_S = 600.0  # long, because rank 0 may be uploading the model to the Hub
POLL_S = 0.05
MAX_PROCESSES = 100_000
OUT_OF_MEMORY = ", usually because the host ran out of memory"  # after SIGKILL
PR_SET_PDEATHSIG = 1  # linux/prctl.h: the signal that a process receives when its parent ends
Command = Sequence[str]  # a script with its arguments
Target = Callable[[], int]  # function that a forked process runs; returns the exit code
Ranks = Sequence[psutil.Process]


def current_process() -> Process | None:
    """Return the ranks and world sizes that a launcher set for this process, and store them in
    torchrun's environment variables. Return None if no launcher started this process. Raises
    UserError if the launcher's variables are invalid or incomplete."""
    launcher = find_launcher(os.environ)
    if launcher is None:
        _refuse_other_launchers()
        return None
    rank = _read_number(launcher.rank)
    world_size = _read_number(launcher.world_size)
    # Libraries read these variables.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    if world_size > MAX_PROCESSES:
        what = f"{launcher.world_size}={world_size} is too large"
        raise UserError(what, fix=f"the maximum is {MAX_PROCESSES:,}")
    if not 0 <= rank < world_size:
        what = f"{launcher.rank}={rank} is out of range for {launcher.world_size}={world_size}"
        fix = f"ranks must be from 0 to {world_size - 1}"
        raise UserError(
            what, fix=fix if world_size else f"{launcher.world_size} must be at least 1"
        )
    if world_size == 1:
        return single_process()
    if unset := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        started = f"{launcher.name} started this command {world_size} times"
        if launcher.name in ("by hand", "PyTorchJob"):
            started = f"RANK={rank} and WORLD_SIZE={world_size} are set"
        fix = "on one machine, use --num_gpus N without a launcher. On several machines, start one "
        fix += (
            "torchrun per node, as sbatch --nodes=2 configs/train.slurm "
            "does. Alternatively, set MASTER_ADDR "
        )
        fix += "to the host of rank 0, and MASTER_PORT to a free port on that host"
        missing = f"{' and '.join(unset)} {'is' if len(unset) == 1 else 'are'} not set"
        raise UserError(f"{started}, but {missing}", fix=fix)
    if not 0 < (port := _read_number("MASTER_PORT")) < 2**16:
        raise UserError(
            f"MASTER_PORT={port} is not a valid port", fix="use a number from 1 to 65535"
        )
    local = {"local_rank": launcher.local_rank, "local_world_size": launcher.local_world_size}
    local_numbers = {field: _read_number(name) for field, name in local.items() if name}
    os.environ.update({field.upper(): str(number) for field, number in local_numbers.items()})
    return Process(
        rank=rank, world_size=world_size, **{"local_rank": 0, "local_world_size": 0} | local_numbers
    )


def _read_number(name: str) -> int:
    text = os.environ[name]
    if not (text.isascii() and text.isdecimal()):
        what = f"{name}={shown(text)} is not a number"
        why = "the launcher must set this variable to a number"
        raise UserError(what, why, f"correct {name}, or start with torchrun")
    return int(text)


def _refuse_other_launchers() -> None:
    """Raise UserError if a launcher seems to have started several processes but did not set this
    process's rank and the number of processes."""
    if name := find_uncounted_rank(os.environ):
        what = f"{name} is set, but WORLD_SIZE is not"
        why = "each process would start a separate run"
        raise UserError(what, why, f"start with torchrun, or unset {name}")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        what = f"WORLD_SIZE={shown(os.environ['WORLD_SIZE'])} is set, but RANK is not"
        raise UserError(what, fix="start with torchrun, or unset WORLD_SIZE")
    name, nodes = find_num_nodes(os.environ)
    if nodes > 1:
        what = f"{name} specifies {nodes} nodes, but this process has no rank"
        why = "each node would start a separate run"
        raise UserError(what, why, "start with torchrun, as in CLUSTER_QUICKSTART.md")
    if "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ:
        what = "accelerate launch started one process, although several were requested"
        why = "without GPUs, accelerate launch needs --mpirun_hostfile"
        raise UserError(what, why, "use --num_gpus N instead of accelerate")


def require_loopback() -> None:
    """Raise UserError if processes on this machine cannot connect to one another, for example
    because the loopback interface is down. Without this check, the processes would wait forever."""
    try:
        with socket.create_server((LOOPBACK, 0)) as listener:
            socket.create_connection(listener.getsockname(), timeout=5.0).close()
    except OSError as error:
        what = f"processes cannot connect to {LOOPBACK}"
        fix = "enable the loopback interface. Run: ip link set lo up"
        raise UserError(what, str(error.strerror or error), fix) from None


def single_process() -> Process:
    """Return the `Process` for a run that has only one process. Set the variables that libraries
    read, as a launcher would."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR=LOOPBACK, MASTER_PORT="0")
    return Process(rank=0, world_size=1, local_rank=0, local_world_size=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class RanksOutcome:
    """Outcome of the ranks on one machine: their return codes, and the signal that stopped the
    launching process, if any."""

    signum: int  # number of the signal that stopped this process; 0 if none
    codes: dict[int, int]  # rank -> return code, as in Popen, of ranks that ended by themselves

    @property
    def exit_code(self) -> int:
        """Return the launcher's exit code. After a signal, the code is `128 + signum`. Otherwise,
        the code is 0 if no rank failed, the exit code of the failed ranks if they all exited with
        the same code, and 1 in all other cases."""
        if self.signum:
            return 128 + self.signum
        failed = {code for code in self.codes.values() if code}
        if len(failed) == 1 and min(failed) > 0:
            return min(failed)
        return int(bool(failed))

    @property
    def reason(self) -> str:
        """Return the name of the signal that stopped this process. If there is none, describe the
        ranks that were killed, or return "" if no rank was killed."""
        if self.signum:
            return signal.Signals(self.signum).name
        # Ranks may abort because a peer was killed.
        codes = {code for code in self.codes.values() if code < 0}
        code = next(iter(sorted(codes - {-signal.SIGABRT}) or codes), 0)
        if not code:
            return ""
        verb = "was" if list(self.codes.values()).count(code) == 1 else "were"
        return f"{self._ranks_with(code)} {verb} {describe_kill(-code)}"

    @property
    def early_exits(self) -> str:
        """Describe the ranks that exited with code 0 although other ranks failed. Return "" if
        there are none."""
        if 0 not in self.codes.values() or not any(self.codes.values()):
            return ""
        return f"{self._ranks_with(0)} exited with code 0 before the end of the run"

    def _ranks_with(self, code: int) -> str:
        return format_numbers(
            "rank", [rank for rank in sorted(self.codes) if self.codes[rank] == code]
        )


@contextlib.contextmanager
def start_early(command: Command, count: int) -> Iterator[Ranks]:
    """Start `count` ranks and yield them, so that `run_ranks` can use them later. Terminate the
    ranks if the `with` block raises an exception."""
    ranks: list[psutil.Process] = []
    try:
        if count:
            _start(ranks, command, count)
        yield ranks
    except BaseException:
        _terminate(ranks, was_signaled=False)
        raise


def run_ranks(
    program: Command | Target, count: int, started_ranks: Ranks = (), stdin_line: str = ""
) -> RanksOutcome:
    """Start `count` ranks, or use the ranks in `started_ranks`, and wait for all of them. Ranks
    that run a command receive `stdin_line` on standard input. If a rank fails, the others are
    terminated. Stop signals and Ctrl-Z are forwarded to the ranks."""
    ranks = list(started_ranks)
    signals: list[int] = []
    codes: dict[int, int] = {}

    def forward_signal(signum: int, _frame: Any) -> None:
        signals.append(signum)
        _send_signal(ranks, signum)

    def suspend(*_: Any) -> None:
        _send_signal(ranks, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        _send_signal(ranks, signal.SIGCONT)  # after `fg` has continued this process

    with handle_signals({**dict.fromkeys(STOP_SIGNALS, forward_signal), signal.SIGTSTP: suspend}):
        try:
            if not ranks:
                _start(ranks, program, count)
            for process in [] if callable(program) else ranks:
                # The process may have ended already.
                with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
                    pipe.write(f"{stdin_line}\n".encode())
            if signals:  # a signal came before all ranks had started
                _send_signal(ranks, signals[-1])
            last_progress_at = time.monotonic()
            last_cpu_s: Any = None
            while not (signals or any(codes.values()) or len(codes) == len(ranks)):
                exited, alive = psutil.wait_procs(ranks, POLL_S)
                codes = {ranks.index(process): process.returncode for process in exited}
                cpu_s, stopped = _read_cpu_times(alive) if codes else (None, False)
                if cpu_s is None or cpu_s != last_cpu_s:
                    last_progress_at = time.monotonic()
                    last_cpu_s = cpu_s
                elif time.monotonic() - last_progress_at > (
                    STOPPED_TIMEOUT_S if stopped else IDLE_TIMEOUT_S
                ):
                    stuck_ranks = format_numbers(
                        "rank", [ranks.index(process) for process in alive]
                    )
                    print_stderr(
                        f"note: {stuck_ranks} did not end with the other ranks and will be "
                        "terminated"
                    )
                    break
        finally:
            _terminate(ranks, was_signaled=bool(signals))
    return RanksOutcome(signum=signals[0] if signals else 0, codes=codes)


def _read_cpu_times(processes: Iterable[psutil.Process]) -> tuple[list[float], bool]:
    """Return the CPU time of each process in seconds, and whether any process is stopped
    (SIGSTOP)."""
    cpu_s = []
    stopped = False
    for process in processes:
        with contextlib.suppress(psutil.Error):  # the process has ended
            cpu_s.append(sum(process.cpu_times()[:2]))
            stopped = stopped or process.status() == psutil.STATUS_STOPPED
    return cpu_s, stopped


def _start(ranks: list[psutil.Process], program: Command | Target, count: int) -> None:
    require_loopback()
    with socket.create_server((LOOPBACK, 0)) as listener:
        environment = {
            "OMP_NUM_THREADS": str(threads_per_process(count)), **os.environ,
            "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(listener.getsockname()[1]),
            LAUNCHER_PID_VARIABLE: str(os.getpid()), STORE_SOCKET: str(listener.fileno()),
        }  # fmt: skip
        for rank in range(count):
            variables = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            if callable(program):
                ranks.append(fork(functools.partial(_run_rank, program, variables, listener)))
                continue
            process = psutil.Popen(
                [sys.executable, "-u", *program],
                env=variables,
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()] if rank == 0 else [],
                # Ctrl-C in a terminal reaches the ranks once, through this process.
                start_new_session=True,
            )
            ranks.append(process)


def _run_rank(target: Target, environment: Mapping[str, str], store_listener: socket.socket) -> int:
    if environment["RANK"] != "0":
        store_listener.close()
    os.environ.update(environment)
    # Process name in `top`, at most 15 characters
    Path("/proc/self/comm").write_text(f"rank {environment['RANK']}")
    return target()


def _send_signal(ranks: Ranks, signum: int) -> None:
    for process in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):  # the process has ended
            process.send_signal(signum)


def _terminate(ranks: Ranks, *, was_signaled: bool) -> None:
    """Terminate all ranks. The ranks have a limited time to save a checkpoint or, if a rank failed,
    to report the cause. Ranks that are still running after this time are killed. `was_signaled` is
    True if the ranks have already received a signal."""
    timeout_s = SHUTDOWN_TIMEOUT_S
    with contextlib.suppress(ValueError):  # ignore an invalid value, because the ranks must end
        timeout_s = float(os.environ.get(SHUTDOWN_TIMEOUT_VARIABLE, SHUTDOWN_TIMEOUT_S))
    if not was_signaled:
        _send_signal(ranks, signal.SIGTERM)
        timeout_s = min(timeout_s, FAILURE_TIMEOUT_S)
    _, survivors = psutil.wait_procs(ranks, timeout_s)
    _send_signal(survivors, signal.SIGKILL)
    psutil.wait_procs(survivors)


def fork(target: Target) -> psutil.Process:
    """Run `target` in a forked process. This process must have no other threads. The forked process
    has its own session and Python's default signal handlers. Ctrl-C in a terminal therefore reaches
    the forked process only once, through this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    signals = (*STOP_SIGNALS, signal.SIGTSTP)
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    if pid := os.fork():
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        return psutil.Process(pid)
    code = 1
    try:
        try:
            os.setsid()
            for signum in signals:
                if signal.getsignal(signum) != signal.SIG_IGN:
                    interrupts = signum == signal.SIGINT
                    handler = signal.default_int_handler if interrupts else signal.SIG_DFL
                    signal.signal(signum, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # standard input
            code = target()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # runs even if a second signal arrives
        os._exit(code)  # the callers on the stack belong to the parent process


def compute_in_fork(compute: Callable[[], str]) -> Callable[[], str]:
    """Start a forked process that calls `compute`, and return a function that waits for the result.
    The returned function raises RunError if the forked process was killed, and SystemExit if it
    failed. If this process ends, the forked process ends as well."""
    read_fd, write_fd = os.pipe()

    def target() -> int:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGINT)
        with contextlib.suppress(KeyboardInterrupt), open(write_fd, "w") as pipe:
            pipe.write(compute())
        return 0

    process = fork(target)
    os.close(write_fd)

    def wait() -> str:
        with open(read_fd) as pipe:
            text = pipe.read()
        code = process.wait()
        if code < 0:
            raise RunError(f"the planning process was {describe_kill(-code)}")
        if code or not text:
            raise SystemExit(code or 1)
        return text

    return wait


def describe_kill(signum: int) -> str:
    """Describe the signal that killed a process. For SIGKILL, add the most likely cause."""
    name = signal.Signals(signum).name
    return f"killed by {name}{OUT_OF_MEMORY if name == 'SIGKILL' else ''}"
