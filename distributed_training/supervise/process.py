"""Describe a process of a run: its rank and its signal handlers.

This module does not import torch."""

import contextlib
import ctypes
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Environment variable of the ranks that `run_ranks` starts: the id of the launching process, and
# the descriptors of the files for the store and for the rank's reports
LAUNCHER_VARIABLE = "RANKS_LAUNCHER"
END_ACTIVITY = "the end"  # activity of a rank after the model has been written
PR_SET_PDEATHSIG = 1  # linux/prctl.h: the signal that a process receives when its parent ends
# Signals that stop a run
STOP_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,  # SLURM sends these before a time limit: --signal=USR1@90
    signal.SIGXCPU,  # the kernel and Grid Engine send this at a CPU time limit
)


def end_with_parent() -> None:
    """Let this process receive SIGTERM when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """Ranks and world sizes of this process, as set by its launcher."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


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
