"""Describe a process of a run: its rank, its startup phases and its signal handlers.

This module does not import torch."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Environment variable of the ranks that `run_ranks` starts: the id of the launching process, and
# the descriptors of the files for the store, the rank's activity and the rank's stack
LAUNCHER_VARIABLE = "RANKS_LAUNCHER"
END_ACTIVITY = "the end"  # activity of a rank after the model has been written
# Signals that stop a run
STOP_SIGNALS = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT,
    signal.SIGUSR1, signal.SIGUSR2,  # SLURM sends these before a time limit: --signal=USR1@90
    signal.SIGXCPU,  # the kernel and Grid Engine send this at a CPU time limit
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """Ranks and world sizes of this process, as set by its launcher."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @property
    def on_one_machine(self) -> bool:
        """True if all processes of the run are on this machine."""
        return self.local_world_size == self.world_size


class Startup:
    """Duration in seconds of each startup phase, from the start of this process to the end of its
    first step. In a forked process, `earlier_seconds` contains the durations of the phases before
    the fork."""

    def __init__(self, earlier_seconds: Mapping[str, float] | None = None) -> None:
        self.seconds = dict(earlier_seconds or {})
        self._phase_start = time.monotonic()
        if not earlier_seconds:
            # /proc has the start time of this process in clock ticks since boot.
            fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
            start_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
            self._phase_start -= time.clock_gettime(time.CLOCK_BOOTTIME) - start_s

    def end(self, phase: str) -> None:
        """Record the end of a phase and begin the next one."""
        now = time.monotonic()
        self.seconds[phase] = round(now - self._phase_start, 3)
        self._phase_start = now


@contextlib.contextmanager
def handle_signals(
    handlers: Mapping[signal.Signals, Callable[..., None]],
) -> Iterator[dict[signal.Signals, Any]]:
    """Handle signals with `handlers` inside the `with` block, and yield the previous handlers.
    Ignored signals, such as SIGHUP under nohup, stay ignored."""
    previous_handlers: dict[signal.Signals, Any] = {}
    for signum, handler in handlers.items():
        if signal.getsignal(signum) != signal.SIG_IGN:
            previous_handlers[signum] = signal.signal(signum, handler)
    try:
        yield previous_handlers
    finally:
        for signum, handler in previous_handlers.items():
            signal.signal(signum, handler)


def format_numbers(noun: str, numbers: list[int]) -> str:
    """Return a string such as "rank 3", "ranks 1, 4" or "ranks 8 to 15"."""
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{noun}s {numbers[0]} to {numbers[-1]}"
    return f"{noun}s {', '.join(map(str, numbers))}"
