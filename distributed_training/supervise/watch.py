"""Send heartbeats and detect hangs.

Threads in each process end the process if its launcher or another process is lost, or if training
makes no progress. Every process writes its activity to the process group's store and reads the
activity of the next rank. Each rank thus notices if the next rank freezes or becomes unreachable.
Rank 0 also limits the duration of each activity. Time during which this process was stopped, for
example by Ctrl-Z, does not count."""

import contextlib
import itertools
import json
import os
import platform
import signal
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from distributed_training.records.record import has_finished, mark_stopped
from distributed_training.settings.config import RunConfig
from distributed_training.settings.errors import RunError, print_stderr
from distributed_training.supervise import claims
from distributed_training.supervise.process import LAUNCHER_PID_VARIABLE, Process

END_ACTIVITY = "the end"  # activity of a rank after the model has been written
HEARTBEAT_INTERVAL_S = 2.0
MIN_LIMIT_S = 60.0  # minimum time limit for a step; the limit is 20 times the median step
DEFAULT_LIMIT_S = 600.0  # time limit for all other activities
LOST_S = 30.0  # a process counts as lost after this time without a heartbeat
REPORTED_WITHIN_S = 10.0  # a process that fails records the reason within this time
SLOW_S = 45.0  # after this time in one activity, rank 0 prints which rank the others wait for
GRACE_S = 10.0  # time to save after the launcher is lost
# Variables that our launcher, torchrun and deepspeed set
_LAUNCHER_VARIABLES = (LAUNCHER_PID_VARIABLE, "TORCHELASTIC_RUN_ID", "LOCAL_SIZE")


class Watch:
    """Threads that watch this process, its launcher and the other ranks. The main thread calls
    `set_activity` at the start of each activity."""

    def __init__(self, process: Process) -> None:
        if os.environ.get(LAUNCHER_PID_VARIABLE, str(os.getppid())) != str(os.getppid()):
            sys.exit(128 + signal.SIGTERM)  # the launcher was killed before it could be watched
        self.launchers = find_launchers() if any(map(os.environ.get, _LAUNCHER_VARIABLES)) else []
        self.run_dir = Path(os.devnull)  # nothing can be recorded until `begin`
        self.rank = process.rank
        self.world_size = process.world_size
        self._next_rank = (process.rank + 1) % process.world_size
        self._timeout_s: float | None = None
        self._min_limit_s = 0.0
        # Durations of the most recent steps, to the nearest second
        self._steps_s: deque[float] = deque(maxlen=1000)
        self._activity = "startup"
        self._activity_start = 0.0
        self._num_activities = 0  # number of activities so far; startup has no limit
        self._is_step = False
        self._clock = 0.0  # seconds that this process has run, except while it was stopped
        self._heartbeats: dict[int, dict[str, Any]] = {}
        self._heartbeat_at = self._response_at = float("inf")
        self._slow_count = 0
        self._is_on_first_node = process.rank == process.local_rank  # this node has the store
        self._ended = threading.Event()
        threading.Thread(target=self._check_periodically, daemon=True).start()

    def begin(self, run_dir: Path, config: RunConfig, store: dist.Store) -> None:
        """Start watching the other processes. Call this method once the run directory and the store
        exist."""
        claims.hold(run_dir)
        self.run_dir = run_dir
        self._timeout_s = config.hang_timeout_s
        # Compilation and profiling delay some steps.
        self._min_limit_s = DEFAULT_LIMIT_S if config.compile or config.profile else MIN_LIMIT_S
        self._heartbeat_at = self._response_at = self._clock
        threading.Thread(target=self._send_heartbeats, args=[store], daemon=True).start()

    def set_activity(self, activity: str, *, is_step: bool = False) -> None:
        """Record that the main thread is starting an activity."""
        if self._is_step:
            self._steps_s.append(self._clock - self._activity_start)
        self._is_step = is_step
        self._activity = activity
        self._activity_start = self._clock
        self._num_activities += 1

    @property
    def activity(self) -> str:
        """Current activity of the main thread."""
        return self._activity

    @property
    def limit_s(self) -> float:
        """Time limit of the current activity in seconds. 0 means no limit."""
        if self._timeout_s is not None:
            compiles = self._is_step and not self._steps_s and self._min_limit_s == DEFAULT_LIMIT_S
            if self._timeout_s and compiles:
                return max(self._timeout_s, DEFAULT_LIMIT_S)
            return self._timeout_s
        # A single process cannot hang in a collective, and a debugger may stop it.
        if self.world_size == 1:
            return 0.0
        if self._is_step and self._steps_s:
            return max(self._min_limit_s, 20 * statistics.median(self._steps_s))
        return DEFAULT_LIMIT_S

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()

    def _send_heartbeats(self, main_store: dist.Store) -> None:
        """Write and read heartbeats periodically. The thread blocks while the store does not
        respond."""
        store = dist.PrefixStore("watch", main_store.clone())  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=LOST_S))
        num_beats = 0
        while num_beats == 0 or not self._ended.wait(HEARTBEAT_INTERVAL_S):
            num_beats += 1
            try:
                store.set(str(self.rank), json.dumps({"beat": num_beats, **self._describe()}))
                watched_ranks = {self._next_rank}
                if self._is_on_first_node:  # ranks on this node kill rank 0 if it freezes
                    watched_ranks.add(0)
                if self.rank == 0 and self._clock - self._activity_start > SLOW_S / 2:
                    watched_ranks.update(range(self.world_size))
                known_ranks = [rank for rank in sorted(watched_ranks) if store.check([str(rank)])]
                heartbeats = {rank: json.loads(store.get(str(rank))) for rank in known_ranks}
            except (RuntimeError, ValueError):
                return  # the connection is permanently lost. _check_periodically reports the loss
            self._response_at = self._clock
            if heartbeats.get(self._next_rank) != self._heartbeats.get(self._next_rank):
                self._heartbeat_at = self._clock
            self._heartbeats |= heartbeats

    def _describe(self) -> dict[str, Any]:
        """Return the contents of a heartbeat."""
        return {"host": platform.node(), "activity": self._activity, "count": self._num_activities}

    def _check_periodically(self) -> None:
        """Check once per second that the launcher and the other ranks are alive, and that training
        makes progress."""
        last_check = time.monotonic()
        orphaned_at = 0.0
        while not self._ended.wait(1.0):
            now = time.monotonic()
            self._clock += min(now - last_check, 2.0)
            last_check = now
            if not orphaned_at and not all(map(_is_alive, self.launchers)):
                orphaned_at = self._clock
                pids = ", ".join(str(process.pid) for process in self.launchers)
                reason = f"the launcher (process {pids}) was killed"
                mark_stopped(self.run_dir, "interrupted", reason)
                # Training saves on SIGTERM. Before and after training, SIGTERM ends the process.
                os.kill(os.getpid(), signal.SIGTERM)
            elif orphaned_at and self._clock - orphaned_at > GRACE_S:
                os._exit(128 + signal.SIGTERM)
            if self.world_size > 1:
                self._check_other_ranks()
            if self.rank == 0 and self._num_activities:
                self._check_progress(self._clock - self._activity_start)

    def _check_other_ranks(self) -> None:
        no_heartbeat = f"no heartbeat for {LOST_S:.0f} s"
        unreported_s = LOST_S - REPORTED_WITHIN_S
        if self._clock - self._response_at > LOST_S:
            rank_0_host = os.environ["MASTER_ADDR"]
            this_rank = f"rank {self.rank} on {platform.node()}"
            reason = f"{this_rank} lost rank 0 on {rank_0_host}: {no_heartbeat}"
            self._give_up(reason, unreported_s)
        # The next rank is lost only if the store responds. Otherwise, the store itself is lost.
        if self._clock - self._heartbeat_at > LOST_S > 2 * (self._clock - self._response_at):
            heartbeat = self._heartbeats.get(self._next_rank, {})
            lost_rank = f"rank {self._next_rank}" + (
                f" on {heartbeat['host']}" if heartbeat else ""
            )
            reason = (
                f"lost {lost_rank} during {self._activity}: {no_heartbeat}, so the rank is frozen "
                "or cut off"
            )
            self._give_up(reason, unreported_s)

    def _check_progress(self, seconds: float) -> None:
        # The store may be slow, so use the current state of this rank instead of its heartbeat.
        by_rank = {**self._heartbeats, 0: self._describe()}
        states = [by_rank[rank] for rank in sorted(by_rank)]
        limit_s = self.limit_s
        if (
            seconds > SLOW_S
            and self._slow_count != self._num_activities
            and len(states) == self.world_size
        ):
            self._slow_count = self._num_activities
            text = f"{self._activity} has taken {seconds:.0f} s: {describe_late_ranks(states)}."
            if limit_s:
                text += f" The run ends after {limit_s:g} s without progress (hang_timeout_s)."
            print_stderr(f"note: {text}")
        if limit_s and seconds > limit_s:
            reason = f"{self._activity} has hung for {seconds:.0f} s: {describe_late_ranks(states)}"
            self._give_up(reason, seconds)

    def _give_up(self, reason: str, ago_s: float) -> NoReturn:
        """Record and print the reason for ending the run, and end this process. The launcher of
        this process then terminates the remaining processes, frozen ones with SIGKILL. `ago_s` is
        the time in seconds since the cause occurred."""
        with contextlib.suppress(OSError):  # for example a full disk
            mark_stopped(self.run_dir, "failed", reason, ago_s=ago_s)
            get_error_handler().record_exception(RunError(reason))
        finished = self._activity == END_ACTIVITY and has_finished(self.run_dir)
        prefix = "note: after the run had finished" if finished else "error"
        print_stderr(f"{prefix}: {reason}")
        os._exit(0 if finished else 1)


def find_launchers() -> list[psutil.Process]:
    """Return the parent process. Under deepspeed, also return the launchers above it in the process
    tree."""
    parents = psutil.Process().parents()
    deepspeed_launchers = itertools.takewhile(
        lambda p: "deepspeed" in " ".join(p.cmdline()), parents[1:]
    )
    return [*parents[:1], *deepspeed_launchers]


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def describe_late_ranks(states: Sequence[Mapping[str, Any]]) -> str:
    """Describe the ranks that have started the fewest activities, because the other ranks are
    waiting for these. `states` contains the result of `_describe` for each rank."""
    min_count = min(state["count"] for state in states)
    late_ranks = [rank for rank, state in enumerate(states) if state["count"] == min_count]
    activity = states[late_ranks[0]]["activity"]
    if len(late_ranks) == len(states):
        return f"all ranks are in {activity}"
    descriptions = [f"rank {rank} on {states[rank]['host']}" for rank in late_ranks[:4]]
    verb = "is" if len(descriptions) == 1 else "are"
    return f"waiting for {', '.join(descriptions)}, which {verb} in {activity}"
