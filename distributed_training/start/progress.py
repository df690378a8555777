"""Publish a rank's activity, and detect from outside that a rank hangs. This module does not import
torch.

Each rank writes its activity to a file of its own whenever the activity changes. The files are in
memory and have no names. The launching process reads them once per second. Only if a rank seems to
hang does the launching process ask for the stack of the main thread, with a signal."""

import contextlib
import faulthandler
import os
import re
import signal
import statistics
import struct
import subprocess
import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from distributed_training.settings.config import RunConfig
from distributed_training.settings.errors import print_stderr, printable

MIN_LIMIT_S = 60.0  # minimum time limit for a step; the limit is 20 times the median step
DEFAULT_LIMIT_S = 600.0  # time limit for all other activities
STOPPED_LIMIT_S = 30.0  # time limit for a rank that is stopped (SIGSTOP)
TIMER_MARGIN_S = 30.0  # the time limits of torch's collectives come first, because they explain
CHECK_INTERVAL_S = 1.0
NO_LIMIT, LIMITED, STEP = range(3)  # kinds of activities
# Contents of a progress file: the number of activities so far, the kind and name of the current one
_FORMAT = struct.Struct("=QB119s")
# Files whose functions wait for other ranks in collectives. DeepSpeed's CPU Adam and file transfers
# are excluded, because they run for a long time without other ranks.
_COLLECTIVE_FILES = re.compile(
    r"/(torch/(distributed/|autograd/|nn/parallel/|_ops\.py)"
    r"|deepspeed/(comm/|runtime/zero/|runtime/pipe/))"
)
_WRAPPER_FILE = "/deepspeed/utils/nvtx.py"  # wraps all of DeepSpeed's functions
_FRAME_LINE = re.compile(r'  File "(.*)", line (\d+) in (.*)')  # in faulthandler's output


@dataclass(frozen=True, slots=True)
class Activity:
    """Activity that a rank has published."""

    count: int = 0  # number of activities so far
    kind: int = NO_LIMIT
    name: str = "startup"


class Progress:
    """Current activity of this rank. Under another launcher, nobody reads the activity. Then, a
    timer of the kernel ends the process if an activity takes too long."""

    def __init__(self, progress_fd: int = -1, stack_fd: int = -1) -> None:
        self.activity = Activity()
        self._progress_fd = progress_fd
        self._timer_s = 0.0
        if stack_fd >= 0:
            # The stacks of other threads are not read, because threads of C++ change CPython's
            # list of threads at any time.
            faulthandler.register(signal.SIGURG, stack_fd, all_threads=False)

    def begin(self, config: RunConfig, world_size: int) -> None:
        """Start the timer of the kernel if no launching process reads the activity."""
        limit_s = find_limit(config, world_size, LIMITED)
        if self._progress_fd < 0 and limit_s:
            self._timer_s = limit_s + TIMER_MARGIN_S

    def set_activity(self, activity: str, *, is_step: bool = False) -> None:
        """Publish that the main thread starts an activity."""
        self._publish(activity, STEP if is_step else LIMITED)

    def end(self) -> None:
        """Publish that other ranks no longer wait for this rank."""
        self._timer_s = 0.0
        self._publish(self.activity.name, NO_LIMIT)

    def _publish(self, name: str, kind: int) -> None:
        self.activity = Activity(self.activity.count + 1, kind, name)
        if self._progress_fd >= 0:
            packed = _FORMAT.pack(self.activity.count, kind, name.encode())
            os.pwrite(self._progress_fd, packed, 0)
        else:
            signal.setitimer(signal.ITIMER_REAL, self._timer_s)


def find_limit(
    config: RunConfig, world_size: int, kind: int, steps_s: Collection[float] = ()
) -> float:
    """Return the time limit of an activity in seconds, or 0 if there is no limit. `steps_s`
    contains the durations of earlier steps."""
    timeout_s = config.hang_timeout_s
    # A single process cannot hang in a collective, and a debugger may stop it.
    if kind == NO_LIMIT or timeout_s == 0 or (timeout_s is None and world_size == 1):
        return 0.0
    is_slow = bool(config.compile or config.profile)  # compilation and profiling delay some steps
    if kind == STEP and steps_s and timeout_s is None:
        min_limit_s = DEFAULT_LIMIT_S if is_slow else MIN_LIMIT_S
        return max(min_limit_s, 20 * statistics.median(steps_s))
    if kind == STEP and not steps_s and is_slow:
        return max(float(timeout_s or 0), DEFAULT_LIMIT_S)
    return float(timeout_s or DEFAULT_LIMIT_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """A rank that this process started, with the files in which the rank reports to it."""

    process: subprocess.Popen[bytes]
    progress_fd: int
    stack_fd: int

    def read_activity(self) -> Activity:
        """Return the activity that the rank has published."""
        data = os.pread(self.progress_fd, _FORMAT.size, 0)
        if len(data) < _FORMAT.size:
            return Activity()
        count, kind, name = _FORMAT.unpack(data)
        return Activity(count, kind, printable(name.rstrip(b"\0").decode(errors="replace")))

    def is_stopped(self) -> bool:
        """Return whether the rank is stopped, for example by SIGSTOP."""
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
            return stat.rpartition(")")[2].split()[0] == "T"
        return False

    def request_stack(self) -> None:
        """Ask the rank for the stack of its main thread. The rank writes it to `stack_fd`."""
        os.ftruncate(self.stack_fd, 0)
        os.lseek(self.stack_fd, 0, os.SEEK_SET)  # the rank shares the position in the file
        self.process.send_signal(signal.SIGURG)

    def read_stack(self) -> tuple[bool, str]:
        """Return whether the rank waits for other ranks in a collective, and the innermost line of
        this package that the rank executes."""
        text = os.pread(self.stack_fd, 2**16, 0).decode(errors="replace")
        in_collective = None
        for line in text.splitlines():
            if frame := _FRAME_LINE.fullmatch(line):
                # The innermost frame comes first, and only this frame counts.
                if in_collective is None and not frame[1].endswith(_WRAPPER_FILE):
                    in_collective = bool(_COLLECTIVE_FILES.search(frame[1]))
                if "distributed_training/" in frame[1]:
                    code_line = f" at {Path(frame[1]).name}:{frame[2]} {frame[3]}"
                    return bool(in_collective), code_line
        return bool(in_collective), ""


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
        self._requested_stacks = False
        self._suspects = ""

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
                self._stopped_since.pop(number, None)
            elif (
                self._clock - self._stopped_since.setdefault(number, self._clock) > STOPPED_LIMIT_S
            ):
                return f"rank {number} was stopped (SIGSTOP) during {activities[number].name}"
        slowest = min(activities.values(), key=lambda activity: activity.count)
        if slowest.count != self._slowest.count:
            if self._slowest.kind == STEP:
                self._steps_s.append(self._clock - self._slowest_since)
            self._slowest = slowest
            self._slowest_since = self._clock
            self._requested_stacks = False
            self._suspects = ""
            return ""
        seconds = self._clock - self._slowest_since
        limit_s = find_limit(self._config, self._world_size, slowest.kind, self._steps_s)
        if not limit_s or seconds < limit_s / 2:
            return ""
        if not self._requested_stacks:
            self._requested_stacks = True
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
    """Describe the ranks that the other ranks are waiting for. These are the ranks that have
    started the fewest activities. If all ranks have started the same number, these are the ranks
    that are not in a collective. `stacks` contains the result of `read_stack` for each rank."""
    min_count = min(activity.count for activity in activities.values())
    late_ranks = [rank for rank, activity in activities.items() if activity.count == min_count]
    if len(late_ranks) == len(activities):
        late_ranks = [rank for rank in late_ranks if not stacks[rank][0]] or late_ranks
    first = late_ranks[0]
    position = f"{activities[first].name}{stacks[first][1]}"
    if len(late_ranks) == len(activities):
        return f"all ranks are in {position}"
    descriptions = ", ".join(f"rank {rank}" for rank in late_ranks[:4])
    verb = "is" if len(late_ranks) == 1 else "are"
    return f"waiting for {descriptions}, which {verb} in {position}"
