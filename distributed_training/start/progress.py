"""Publish a rank's activity, and detect from outside that a rank hangs. This module does not import
torch.

Each rank writes its activity to a file of its own whenever the activity changes. The files are in
memory and have no names. The launching process reads them once per second. Only if a rank seems to
hang does the launching process ask for the stack of the main thread, with a signal. The rank
appends its stack to the same file."""

import faulthandler
import os
import re
import signal
import statistics
import subprocess
import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from distributed_training.settings.config import RunConfig
from distributed_training.settings.errors import print_stderr, printable

MIN_LIMIT_S = 60.0  # minimum time limit for a step; the limit is 20 times the median step
DEFAULT_LIMIT_S = 600.0  # time limit for all other activities
STOPPED_LIMIT_S = 30.0  # time limit for a rank that is stopped (SIGSTOP)
TIMER_MARGIN_S = 30.0  # the time limits of torch's collectives come first, because they explain
CHECK_INTERVAL_S = 1.0
STEP = "step "  # beginning of the name of an activity that is a step
_ACTIVITY_BYTES = 128  # size of the activity, which precedes the stack in a rank's file
# Files whose functions wait for other ranks in collectives, and the wrapper of DeepSpeed's
# functions. DeepSpeed's CPU Adam and file transfers are excluded, because they run for a long time
# without other ranks.
_COLLECTIVE_FILES = re.compile(
    r"/(torch/(distributed/|autograd/|nn/parallel/|_ops\.py)"
    r"|deepspeed/(comm/|runtime/zero/|runtime/pipe/|utils/nvtx))"
)
_FRAME_LINE = re.compile(r'  File "(.*)", line (\d+) in (.*)')  # in faulthandler's output


@dataclass(frozen=True, slots=True)
class Activity:
    """Activity that a rank has published."""

    count: int = 0  # number of activities so far
    name: str = ""  # empty if there is no time limit: during startup and after the run


class Progress:
    """Current activity of this rank. Under another launcher, nobody reads the activity. Then, a
    timer of the kernel ends the process if an activity takes too long."""

    def __init__(self, report_fd: int = -1) -> None:
        self.activity = Activity()
        self.limit_s = 0.0  # time limit of each activity under another launcher; 0 if none
        self._report_fd = report_fd
        if report_fd >= 0:
            # The stacks of other threads are not read, because threads of C++ change CPython's
            # list of threads at any time.
            faulthandler.register(signal.SIGURG, report_fd, all_threads=False)

    def set_activity(self, name: str) -> None:
        """Publish that the main thread starts an activity. An empty name ends the time limits."""
        self.activity = Activity(self.activity.count + 1, name)
        if self._report_fd >= 0:
            text = f"{self.activity.count} {name}".encode()
            os.pwrite(self._report_fd, text[:_ACTIVITY_BYTES].ljust(_ACTIVITY_BYTES), 0)
        else:
            has_limit = name and self.limit_s
            signal.setitimer(
                signal.ITIMER_REAL, self.limit_s + TIMER_MARGIN_S if has_limit else 0.0
            )


def find_limit(
    config: RunConfig, world_size: int, name: str = "", steps_s: Collection[float] = ()
) -> float:
    """Return the time limit of the activity `name` in seconds, or 0 if there is no limit. `steps_s`
    contains the durations of earlier steps."""
    timeout_s = config.hang_timeout_s
    # A single process cannot hang in a collective, and a debugger may stop it.
    if timeout_s == 0 or (timeout_s is None and world_size == 1):
        return 0.0
    if timeout_s is not None or not name.startswith(STEP) or not steps_s:
        return float(timeout_s or DEFAULT_LIMIT_S)
    is_slow = config.compile or config.profile  # compilation and profiling delay some steps
    return max(DEFAULT_LIMIT_S if is_slow else MIN_LIMIT_S, 20 * statistics.median(steps_s))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """A rank that this process started, with the file in which the rank reports to it."""

    process: subprocess.Popen[bytes]
    report_fd: int

    def read_activity(self) -> Activity:
        """Return the activity that the rank has published."""
        text = os.pread(self.report_fd, _ACTIVITY_BYTES, 0).decode(errors="replace")
        count, _, name = text.partition(" ")
        return Activity(int(count or 0), printable(name.rstrip()))

    def is_stopped(self) -> bool:
        """Return whether the rank is stopped, for example by SIGSTOP."""
        return psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED

    def request_stack(self) -> None:
        """Ask the rank for the stack of its main thread. The rank appends it to its file."""
        os.ftruncate(self.report_fd, _ACTIVITY_BYTES)
        os.lseek(self.report_fd, _ACTIVITY_BYTES, os.SEEK_SET)  # the rank shares the position
        self.process.send_signal(signal.SIGURG)

    def read_stack(self) -> tuple[bool, str]:
        """Return whether the rank waits for other ranks in a collective, and the innermost line of
        this package that the rank executes."""
        text = os.pread(self.report_fd, 2**16, _ACTIVITY_BYTES).decode(errors="replace")
        frames = _FRAME_LINE.findall(text)  # the innermost frame comes first
        in_collective = bool(frames and _COLLECTIVE_FILES.search(frames[0][0]))
        for file, line, function in frames:
            if "distributed_training/" in file:
                return in_collective, f" at {Path(file).name}:{line} {function}"
        return in_collective, ""


class Monitor:
    """Detects ranks that are stopped or hang. Time during which this process was suspended, for
    example by Ctrl-Z, does not count."""

    def __init__(self, config: RunConfig, world_size: int) -> None:
        self._config = config
        self._world_size = world_size
        self._clock = 0.0
        self._checked_at = time.monotonic()
        self._slowest = Activity()  # activity of the rank with the fewest activities
        self._slowest_since = 0.0
        self._steps_s: deque[float] = deque(maxlen=1000)  # durations of the most recent steps
        self._stopped_since: dict[int, float] = {}
        self._suspects: str | None = None  # empty while the ranks write their stacks

    def check(self, ranks: Mapping[int, Rank]) -> str:
        """Return the reason why the run must end, or "" if there is none. `ranks` contains the
        ranks that are still running. If no rank has made progress for half of the time limit, print
        which rank the others wait for."""
        now = time.monotonic()
        self._clock += min(now - self._checked_at, 2.0)
        self._checked_at = now
        activities = {number: rank.read_activity() for number, rank in ranks.items()}
        for number, rank in ranks.items():
            if not rank.is_stopped():
                self._stopped_since[number] = self._clock
            elif self._clock - self._stopped_since.get(number, 0.0) > STOPPED_LIMIT_S:
                name = activities[number].name or "startup"
                return f"rank {number} was stopped (SIGSTOP) during {name}"
        slowest = min(activities.values(), key=lambda activity: activity.count)
        seconds = self._clock - self._slowest_since
        if slowest.count != self._slowest.count:
            if self._slowest.name.startswith(STEP):
                self._steps_s.append(seconds)
            self._slowest = slowest
            self._slowest_since = self._clock
            self._suspects = None
            return ""
        limit_s = find_limit(self._config, self._world_size, slowest.name, self._steps_s)
        if not limit_s or not slowest.name or seconds < limit_s / 2:
            return ""
        if self._suspects is None:
            self._suspects = ""
            for rank in ranks.values():
                rank.request_stack()
        elif not self._suspects:  # one interval after the request
            stacks = {number: rank.read_stack() for number, rank in ranks.items()}
            self._suspects = describe_suspects(activities, stacks)
            end = f"The run ends after {limit_s:g} s without progress (hang_timeout_s)."
            text = f"{slowest.name} has taken {seconds:.0f} s: {self._suspects}. {end}"
            print_stderr(f"note: {text}")
        elif seconds > limit_s:
            return f"{slowest.name} has hung for {seconds:.0f} s: {self._suspects}"
        return ""


def describe_suspects(
    activities: Mapping[int, Activity], stacks: Mapping[int, tuple[bool, str]]
) -> str:
    """Name a rank that the other ranks are waiting for. This is a rank that has started the fewest
    activities. If all ranks have started the same number, it is a rank that is not in a collective.
    `stacks` contains the result of `read_stack` for each rank."""
    progress = {rank: (activities[rank].count, stacks[rank][0]) for rank in activities}
    suspect = min(activities, key=lambda rank: progress[rank])
    position = f"{activities[suspect].name}{stacks[suspect][1]}"
    if len(set(progress.values())) == 1:
        return f"all ranks are in {position}"
    return f"waiting for rank {suspect}, which is in {position}"
