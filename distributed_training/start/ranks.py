"""Determine the rank of this process, and start, watch and terminate the ranks on one machine. This
module does not import torch.

torchrun's agent is not used, because its store listens on every interface and unpickles incoming
data. Instead, the ranks meet through a file. The file is in memory and has no name, so that nothing
is left behind when the processes end."""

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from distributed_training.settings.errors import UserError
from distributed_training.settings.files import shown
from distributed_training.settings.launchers import find_launcher
from distributed_training.start.progress import CHECK_INTERVAL_S, Monitor, Rank
from distributed_training.supervise.process import (
    LAUNCHER_VARIABLE,
    STOP_SIGNALS,
    Process,
    handle_signals,
)

LOOPBACK = "127.0.0.1"
# Gloo and NCCL then connect the ranks on one machine over loopback, whatever interfaces the
# environment names.
LOOPBACK_INTERFACES = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
# Seconds from a stop signal until the ranks are killed. torchrun uses the same variable and
# default. FAILURE_TIMEOUT_S applies after a rank has failed.
SHUTDOWN_TIMEOUT_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
SHUTDOWN_TIMEOUT_S = 30.0
FAILURE_TIMEOUT_S = 10.0
POLL_S = 0.2
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
    # SLURM writes 4(x2) for two nodes with 4 tasks.
    texts = [os.environ[name].partition("(")[0] for name in launcher[1:]]
    rank, world_size, local_rank, local_world_size = (
        int(text) if text.isdecimal() else -1 for text in texts
    )
    if (
        not 0 <= rank < world_size
        or local_world_size < 1
        or world_size % local_world_size
        or local_rank != rank % local_world_size
    ):
        values = ", ".join(f"{name}={shown(os.environ[name])}" for name in launcher[1:])
        why = "every machine needs the same number of ranks, numbered consecutively"
        raise UserError(f"{values} cannot be used", why, "start with torchrun")
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


def single_process() -> Process:
    """Return the `Process` for a run that has only one process. Set the variables that libraries
    read, as a launcher would."""
    os.environ.update(LOOPBACK_INTERFACES)
    os.environ.update(
        RANK="0",
        WORLD_SIZE="1",
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        MASTER_ADDR=LOOPBACK,
        MASTER_PORT="0",
    )
    return Process(rank=0, world_size=1, local_rank=0, local_world_size=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class RanksOutcome:
    """Outcome of the ranks on one machine."""

    signum: int  # number of the signal that stopped this process; 0 if none
    codes: dict[int, int]  # rank -> return code, as in Popen, of ranks that ended by themselves
    hang: str = ""  # why the ranks were terminated although none had failed

    @property
    def exit_code(self) -> int:
        """Return the launcher's exit code: `128 + signum` after a signal, 0 if no rank failed, the
        exit code of the ranks that exited with a code, or 1."""
        if self.signum:
            return 128 + self.signum
        codes = [code for code in self.codes.values() if code > 0]
        if codes:
            return max(codes)
        return 1 if self.hang or any(self.codes.values()) else 0

    @property
    def reason(self) -> str:
        """Return the name of the signal that stopped this process. If there is none, describe why
        the ranks were terminated, or name a rank that was killed. Return "" if there is none."""
        if self.signum:
            return signal.Signals(self.signum).name
        killed = [rank for rank, code in sorted(self.codes.items()) if code < 0]
        if self.hang or not killed:
            return self.hang
        # Ranks may abort because a peer was killed.
        causes = [rank for rank in killed if self.codes[rank] != -signal.SIGABRT]
        rank = (causes or killed)[0]
        name = signal.Signals(-self.codes[rank]).name
        usual = ", usually because the host ran out of memory" if name == "SIGKILL" else ""
        return f"rank {rank} was killed by {name}{usual}"


def run_ranks(command: Command, count: int, monitor: Monitor | None = None) -> RanksOutcome:
    """Start `count` ranks that run the Python script `command`, and wait for all of them. If a rank
    fails, or if `monitor` finds that a rank hangs, the others are terminated. Stop signals are
    forwarded to the ranks."""
    ranks: list[Rank] = []
    signals: list[int] = []
    codes: dict[int, int] = {}
    hang = ""
    shutdown_timeout_s = float(os.environ.get(SHUTDOWN_TIMEOUT_VARIABLE, SHUTDOWN_TIMEOUT_S))

    def forward_signal(signum: int, _frame: Any) -> None:
        signals.append(signum)
        _send_signal(ranks, signum)

    with handle_signals(dict.fromkeys(STOP_SIGNALS, forward_signal)):
        try:
            _start(ranks, command, count)
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
        finally:
            timeout_s = shutdown_timeout_s if signals else FAILURE_TIMEOUT_S
            _terminate(ranks, codes, timeout_s, was_signaled=bool(signals))
    return RanksOutcome(signum=signals[0] if signals else 0, codes=codes, hang=hang)


def _start(ranks: list[Rank], command: Command, count: int) -> None:
    store = os.memfd_create("store")
    for number in range(count):
        fds = store, os.memfd_create("report")
        environment = {
            **os.environ,
            **LOOPBACK_INTERFACES,
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": "0",
            LAUNCHER_VARIABLE: " ".join(map(str, (os.getpid(), *fds))),
        }
        process = subprocess.Popen(
            [sys.executable, "-u", *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
            # Ctrl-C in a terminal reaches the ranks once, through this process.
            start_new_session=True,
        )
        ranks.append(Rank(process=process, report_fd=fds[1]))


def _read_codes(ranks: Iterable[Rank]) -> dict[int, int]:
    """Return the return codes of the ranks that have ended."""
    codes = {number: rank.process.poll() for number, rank in enumerate(ranks)}
    return {number: code for number, code in codes.items() if code is not None}


def _send_signal(ranks: Iterable[Rank], signum: int) -> None:
    for rank in ranks:
        rank.process.send_signal(signum)  # does nothing if the process has ended


def _terminate(
    ranks: Sequence[Rank], codes: dict[int, int], timeout_s: float, *, was_signaled: bool
) -> None:
    """Terminate all ranks. The ranks have `timeout_s` seconds to save a checkpoint or, if a rank
    failed, to report the cause. Ranks that are still running after this time are killed.
    `was_signaled` is True if the ranks have already received a signal. Add the ranks that were
    killed in the meantime, but not by this process, to `codes`."""
    if not was_signaled:
        _send_signal(ranks, signal.SIGTERM)
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
