"""One process of a run: its number, the phases of its start, its signals. No torch."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# In the environment of the ranks:
LAUNCHER = "RANKS_LAUNCHER"  # the number of the process that started them


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """What a launcher told this process. `local_world_size` is 0 until `rendezvous.locate` if the
    launcher did not tell it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @property
    def on_one_machine(self) -> bool:
        """Whether all processes of the run are known to be."""
        return self.local_world_size == self.world_size


class Startup:
    """Seconds of each phase from the start of this process to the end of its first step; of a fork
    after those that it took `before`."""

    def __init__(self, before: Mapping[str, float] | None = None) -> None:
        self.seconds = dict(before or {})
        self._last = time.monotonic()
        if not before:
            # Whatever the time of day is: since the machine was started
            fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
            begun_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
            self._last -= time.clock_gettime(time.CLOCK_BOOTTIME) - begun_s

    def end(self, phase: str) -> None:
        """A phase has ended, and the next begun."""
        now = time.monotonic()
        self.seconds[phase] = round(now - self._last, 3)
        self._last = now


@contextlib.contextmanager
def handling(handlers: Mapping[signal.Signals, Callable[..., None]]) -> Iterator[None]:
    """Signals handled so in the block, but for those that are ignored, as SIGHUP under nohup."""
    before: dict[signal.Signals, Any] = {}
    for signum, handler in handlers.items():
        if signal.getsignal(signum) != signal.SIG_IGN:
            before[signum] = signal.signal(signum, handler)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def numbered(noun: str, numbers: list[int]) -> str:
    """ "rank 3", "ranks 1, 4", "ranks 8 to 15"."""
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{noun}s {numbers[0]} to {numbers[-1]}"
    return f"{noun}s {', '.join(map(str, numbers))}"
