"""When work was done: on the host's clock, or on a GPU's, tied to it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks points of a stage's work, and later tells when they were reached."""

    def start(self) -> None:
        """Called before a run."""

    def mark(self) -> Any:
        """The point that the device's work has come to."""

    def finish(self) -> None:
        """Wait until all work is done; marks can be read from here on."""

    def read(self, mark: Any) -> int:
        """Nanoseconds on the host's perf_counter, which all processes of a host share."""

    def lag(self, mark: Any) -> int | None:
        """Nanoseconds by which the device came to this point after the host had; None where host
        and device are one."""


class HostClock:
    """For work that is done when the call returns. The raw counter, with no zero of its own: zeros
    taken by each process after a barrier differ by how long each took to leave it."""

    def start(self) -> None: ...

    def mark(self) -> int:
        return time.perf_counter_ns()

    def finish(self) -> None: ...

    def read(self, mark: int) -> int:
        return mark

    def lag(self, mark: int) -> None:
        return None


class EventClock:
    """For a GPU, which works after the call has returned: its own events, tied to the host's time.

    Before each run the device is idle, an event is recorded and waited for, and the host's time
    around it is taken: of `tries` the one in the tightest bracket, halfway.
    """

    def __init__(
        self, new_event: Callable[[], Any], synchronize: Callable[[], None], tries: int = 20
    ) -> None:
        """`new_event` as torch.cuda.Event with timing: record(), synchronize(), elapsed_time()."""
        self.new_event, self.synchronize, self.tries = new_event, synchronize, tries
        self.zero: Any = None
        self.zero_ns = 0

    def start(self) -> None:
        self.synchronize()
        tightest = None
        for _ in range(self.tries):
            event = self.new_event()
            before = time.perf_counter_ns()
            event.record()
            event.synchronize()
            after = time.perf_counter_ns()
            if tightest is None or after - before < tightest:
                tightest = after - before
                self.zero, self.zero_ns = event, (before + after) // 2

    def mark(self) -> tuple[Any, int]:
        event = self.new_event()
        event.record()
        return event, time.perf_counter_ns()

    def finish(self) -> None:
        self.synchronize()

    def read(self, mark: tuple[Any, int]) -> int:
        return self.zero_ns + round(self.zero.elapsed_time(mark[0]) * 1e6)

    def lag(self, mark: tuple[Any, int]) -> int:
        return self.read(mark) - mark[1]


def build_clock(device: torch.device) -> Clock:
    """The clock for work on this device."""
    if device.type == "cuda":
        return EventClock(
            lambda: torch.cuda.Event(enable_timing=True), lambda: torch.cuda.synchronize(device)
        )
    return HostClock()
