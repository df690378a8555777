"""Determine the rank of this process, and start, watch and terminate the ranks on one machine. This
module does not import torch.

torchrun's agent is not used, because its store listens on every interface and unpickles incoming
data. Instead, the ranks meet through a file. The file is in memory and has no name, so that nothing
is left behind when the processes end."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from distributed_training.settings.errors import UserError
from distributed_training.settings.files import shown
from distributed_training.settings.launchers import find_launcher
from distributed_training.settings.machine import threads_per_process
from distributed_training.start.progress import CHECK_INTERVAL_S, Monitor, Rank
from distributed_training.supervise.process import (
    LAUNCHER_VARIABLE,
    STOP_SIGNALS,
    Process,
    format_numbers,
    handle_signals,
)

LOOPBACK = "127.0.0.1"
# Seconds from a stop signal until the ranks are killed. torchrun uses the same variable and
# default. FAILURE_TIMEOUT_S applies after a rank has failed.
SHUTDOWN_TIMEOUT_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
SHUTDOWN_TIMEOUT_S = 30.0
FAILURE_TIMEOUT_S = 10.0
POLL_S = 0.2
MAX_PROCESSES = 100_000
OUT_OF_MEMORY = ", usually because the host ran out of memory"  # after SIGKILL
Command = Sequence[str]  # a script with its arguments


def current_process() -> Process | None:
    """Return the ranks and world sizes that a launcher set for this process, and store them in
    torchrun's environment variables, which libraries read. Return None if no launcher started this
    process. Raises UserError if the launcher's variables are invalid or incomplete."""
    launcher = find_launcher(os.environ)
    if launcher is None:
        if "RANK" in os.environ:
            what = "RANK is set, but WORLD_SIZE, LOCAL_RANK or LOCAL_WORLD_SIZE is not"
            raise UserError(what, fix="start with torchrun, or unset RANK")
        return None
    rank, world_size, local_rank, local_world_size = map(
        _read_number,
        (launcher.rank, launcher.world_size, launcher.local_rank, launcher.local_world_size),
    )
    if not 0 <= rank < world_size:
        what = f"{launcher.rank}={rank} is out of range for {launcher.world_size}={world_size}"
        raise UserError(what, fix="correct both, or start with torchrun")
    if (
        local_world_size < 1
        or world_size % local_world_size
        or local_rank != rank % local_world_size
    ):
        what = f"{launcher.local_rank}={local_rank} does not follow from {launcher.rank}={rank}"
        why = "every machine needs the same number of ranks, numbered consecutively"
        raise UserError(what, why, "start with torchrun")
    if world_size == 1:
        return single_process()
    if unset := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        what = f"{launcher.name} started {world_size} processes, but {unset[0]} is not set"
        fix = "on one machine, use --num_gpus N without a launcher. On several machines, start one "
        fix += "torchrun per node, as sbatch --nodes=2 configs/train.slurm does"
        raise UserError(what, fix=fix)
    process = Process(
        rank=rank, world_size=world_size, local_rank=local_rank, local_world_size=local_world_size
    )
    os.environ.update({name.upper(): str(number) for name, number in asdict(process).items()})
    return process


def _read_number(name: str) -> int:
    text = os.environ[name].partition("(")[0]  # SLURM writes 4(x2) for two nodes with 4 tasks
    if not (text.isascii() and text.isdecimal()):
        what = f"{name}={shown(text)} is not a number"
        raise UserError(what, fix="every machine needs the same number of ranks. Use torchrun")
    return int(text)


def single_process() -> Process:
    """Return the `Process` for a run that has only one process. Set the variables that libraries
    read, as a launcher would."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR=LOOPBACK, MASTER_PORT="0")
    return Process(rank=0, world_size=1, local_rank=0, local_world_size=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class RanksOutcome:
    """Outcome of the ranks on one machine."""

    signum: int  # number of the signal that stopped this process; 0 if none
    codes: dict[int, int]  # rank -> return code, as in Popen, of ranks that ended by themselves
    hang: str = ""  # why the ranks were terminated although none had failed

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
        return int(bool(failed or self.hang))

    @property
    def reason(self) -> str:
        """Return the name of the signal that stopped this process. If there is none, describe the
        rank that hangs or the ranks that were killed. Return "" if there are none."""
        if self.signum:
            return signal.Signals(self.signum).name
        # Ranks may abort because a peer was killed.
        codes = {code for code in self.codes.values() if code < 0}
        code = next(iter(sorted(codes - {-signal.SIGABRT}) or codes), 0)
        if self.hang or not code:
            return self.hang
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


def run_ranks(
    command: Command,
    count: int,
    monitor: Monitor | None = None,
    record_hang: Callable[[str], object] = lambda reason: None,
) -> RanksOutcome:
    """Start `count` ranks that run the Python script `command`, and wait for all of them. If a rank
    fails, or if `monitor` finds that a rank hangs, the others are terminated. The reason of a hang
    is passed to `record_hang` before that. Stop signals and Ctrl-Z are forwarded to the ranks."""
    ranks: list[Rank] = []
    signals: list[int] = []
    codes: dict[int, int] = {}
    hang = ""

    def forward_signal(signum: int, _frame: Any) -> None:
        signals.append(signum)
        _send_signal(ranks, signum)

    def suspend(*_: Any) -> None:
        _send_signal(ranks, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        _send_signal(ranks, signal.SIGCONT)  # after `fg` has continued this process

    with (
        contextlib.ExitStack() as files,
        handle_signals({**dict.fromkeys(STOP_SIGNALS, forward_signal), signal.SIGTSTP: suspend}),
    ):
        try:
            _start(ranks, command, count, files)
            if signals:  # a signal came before all ranks had started
                _send_signal(ranks, signals[-1])
            next_check_at = 0.0
            while not (signals or hang or any(codes.values()) or len(codes) == count):
                time.sleep(POLL_S)
                codes = _read_codes(ranks)
                if monitor is None or len(codes) == count or time.monotonic() < next_check_at:
                    continue
                next_check_at = time.monotonic() + CHECK_INTERVAL_S
                running = {i: rank for i, rank in enumerate(ranks) if i not in codes}
                try:
                    hang = monitor.check(running)
                except Exception:  # the run continues without its monitor
                    traceback.print_exc()
                    monitor = None
            if hang:
                record_hang(hang)
        finally:
            _terminate(ranks, codes, was_signaled=bool(signals))
    return RanksOutcome(signum=signals[0] if signals else 0, codes=codes, hang=hang)


def _start(ranks: list[Rank], command: Command, count: int, files: contextlib.ExitStack) -> None:
    def create_file() -> int:
        fd = os.memfd_create("ranks")
        files.callback(os.close, fd)
        return fd

    store = create_file()
    for number in range(count):
        fds = store, create_file(), create_file()
        environment = {
            "OMP_NUM_THREADS": str(threads_per_process(count)), **os.environ,
            "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
            "RANK": str(number), "LOCAL_RANK": str(number),
            "MASTER_ADDR": LOOPBACK, "MASTER_PORT": "0",
            LAUNCHER_VARIABLE: " ".join(map(str, (os.getpid(), *fds))),
        }  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-u", *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
            # Ctrl-C in a terminal reaches the ranks once, through this process.
            start_new_session=True,
        )
        ranks.append(Rank(process=process, progress_fd=fds[1], stack_fd=fds[2]))


def _read_codes(ranks: Iterable[Rank]) -> dict[int, int]:
    """Return the return codes of the ranks that have ended."""
    codes = {number: rank.process.poll() for number, rank in enumerate(ranks)}
    return {number: code for number, code in codes.items() if code is not None}


def _send_signal(ranks: Iterable[Rank], signum: int) -> None:
    for rank in ranks:
        rank.process.send_signal(signum)  # does nothing if the process has ended


def _terminate(ranks: Sequence[Rank], codes: dict[int, int], *, was_signaled: bool) -> None:
    """Terminate all ranks. The ranks have a limited time to save a checkpoint or, if a rank failed,
    to report the cause. Ranks that are still running after this time are killed. `was_signaled` is
    True if the ranks have already received a signal. Add the ranks that were killed in the
    meantime, but not by this process, to `codes`."""
    timeout_s = SHUTDOWN_TIMEOUT_S
    with contextlib.suppress(ValueError):  # ignore an invalid value, because the ranks must end
        timeout_s = float(os.environ.get(SHUTDOWN_TIMEOUT_VARIABLE, SHUTDOWN_TIMEOUT_S))
    if not was_signaled:
        _send_signal(ranks, signal.SIGTERM)
        timeout_s = min(timeout_s, FAILURE_TIMEOUT_S)
    end = time.monotonic() + timeout_s
    while len(ended := _read_codes(ranks)) < len(ranks) and time.monotonic() < end:
        time.sleep(POLL_S / 4)
    if any(codes.values()):
        # A killed process ends only after its GPU memory has been freed. Its peers may fail first.
        killed = {rank for rank, code in ended.items() if code < 0 and code != -signal.SIGTERM}
        codes.update({rank: ended[rank] for rank in killed})
    _send_signal(ranks, signal.SIGKILL)
    for rank in ranks:
        rank.process.wait()


def describe_kill(signum: int) -> str:
    """Describe the signal that killed a process. For SIGKILL, add the most likely cause."""
    name = signal.Signals(signum).name
    return f"killed by {name}{OUT_OF_MEMORY if name == 'SIGKILL' else ''}"
