"""Send heartbeats and detect hangs.

Threads in each process end the process if its launcher or another process is lost, or if training
makes no progress. Every process writes its activity to the process group's store and reads the
activity of the next rank. Each rank thus notices if the next rank freezes or becomes unreachable.
Rank 0 also limits the duration of each activity. Time during which this process was stopped, for
example by Ctrl-Z, does not count."""

import contextlib
import faulthandler
import itertools
import json
import os
import platform
import re
import signal
import statistics
import sys
import tempfile
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
# Files whose functions wait for other ranks in collectives. DeepSpeed's CPU Adam and file transfers
# are excluded, because they run for a long time without other ranks.
_COLLECTIVE_FILES = re.compile(
    r"/(torch/(distributed/|autograd/|nn/parallel/|_ops\.py)"
    r"|deepspeed/(comm/|runtime/zero/|runtime/pipe/))"
)
_WRAPPER_FILE = "/deepspeed/utils/nvtx.py"  # wraps all of DeepSpeed's functions
# Patterns for lines in faulthandler's output
_THREAD_LINE = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)")
_FRAME_LINE = re.compile(r'  File "(.*)", line (\d+) in (.*)')
# Variables that our launcher, torchrun and deepspeed set
_LAUNCHER_VARIABLES = (LAUNCHER_PID_VARIABLE, "TORCHELASTIC_RUN_ID", "LOCAL_SIZE")


def read_stacks() -> dict[int, list[tuple[str, int, str]]]:
    """Return the stack frames of each thread by thread id. A frame is (file, line, function). The
    innermost frame comes first.

    This function uses faulthandler, which does not create frame objects. In contrast,
    `sys._current_frames()` creates frame objects, which keep the local variables of a function
    alive after the function has returned. For the compiled backward pass of a block, these
    variables occupied up to 5 GiB of GPU memory."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        text = file.read().decode(errors="replace")
    stacks: dict[int, list[tuple[str, int, str]]] = {}
    frames: list[tuple[str, int, str]] = []
    for line in text.splitlines():
        if thread := _THREAD_LINE.match(line):
            frames = stacks.setdefault(int(thread[1], 16), [])
        elif frame := _FRAME_LINE.fullmatch(line):
            frames.append((frame[1], int(frame[2]), frame[3]))
    return stacks


class Watch:
    """Threads that watch this process, its launcher and the other ranks. The main thread calls
    `set_activity` at the start of each activity."""

    def __init__(self, process: Process) -> None:
        if os.environ.get(LAUNCHER_PID_VARIABLE, str(os.getppid())) != str(os.getppid()):
            sys.exit(128 + signal.SIGTERM)  # the launcher was killed before it could be watched
        self.launchers = find_launchers() if any(map(os.environ.get, _LAUNCHER_VARIABLES)) else []
        self.main_thread = threading.get_ident()
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
        self._thread = self.main_thread
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

    def set_activity(
        self, activity: str, *, is_step: bool = False, thread: int | None = None
    ) -> None:
        """Record that the main thread is starting an activity. `thread` is the thread that the main
        thread waits for during this activity, if any."""
        if self._is_step:
            self._steps_s.append(self._clock - self._activity_start)
        self._is_step = is_step
        self._thread = thread or self.main_thread
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
            if self.rank == 0:
                try:
                    claims.renew(self.run_dir)
                except RunError as error:
                    self._give_up(str(error), 0)
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
        """Return the contents of a heartbeat: this process's activity and current line of code."""
        stacks = read_stacks()
        in_collective = None
        code_line = ""
        for file, line, function in stacks.get(self._thread) or stacks[self.main_thread]:
            # Only the innermost frame counts.
            if in_collective is None and not file.endswith(_WRAPPER_FILE):
                in_collective = bool(_COLLECTIVE_FILES.search(file))
            if "distributed_training/" in file:
                code_line = f"{Path(file).name}:{line} {function}"
                break
        return {
            "host": platform.node(), "pid": os.getpid(), "activity": self._activity,
            "count": self._num_activities, "waits": bool(in_collective), "where": code_line,
        }  # fmt: skip

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
        host = platform.node()
        no_heartbeat = f"no heartbeat for {LOST_S:.0f} s"
        unreported_s = LOST_S - REPORTED_WITHIN_S
        if self._clock - self._response_at > LOST_S:
            rank_0_host = os.environ["MASTER_ADDR"]
            reason = f"rank {self.rank} on {host} lost rank 0 on {rank_0_host}: {no_heartbeat}"
            # Kill rank 0 if it is on this machine, because a frozen process does not react to
            # SIGTERM. On other nodes, kill the launcher, which would wait for minutes.
            rank_0 = self._heartbeats.get(0, {})
            pids = [launcher.pid for launcher in self.launchers[:1]]
            if self._is_on_first_node:
                pids = [rank_0["pid"]] if rank_0.get("host") == host else []
            self._give_up(reason, unreported_s, pids)
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
            # A frozen process does not react to SIGTERM, so kill it.
            self._give_up(
                reason, unreported_s, [heartbeat["pid"]] if heartbeat.get("host") == host else []
            )

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

    def _give_up(self, reason: str, ago_s: float, pids: Sequence[int] = ()) -> NoReturn:
        """Record and print the reason for ending the run, kill the processes with the given `pids`,
        and end this process. The launcher of this process then terminates the remaining processes.
        `ago_s` is the time in seconds since the cause occurred."""
        with contextlib.suppress(OSError):  # for example a full disk
            mark_stopped(self.run_dir, "failed", reason, ago_s=ago_s)
            get_error_handler().record_exception(RunError(reason))
        finished = self._activity == END_ACTIVITY and has_finished(self.run_dir)
        prefix = "note: after the run had finished" if finished else "error"
        print_stderr(f"{prefix}: {reason}")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
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
    """Describe the ranks that the other ranks are waiting for. These are the ranks that have
    started the fewest activities. If all ranks have started the same number, these are the ranks
    that are not in a collective. `states` contains the result of `_describe` for each rank."""
    min_count = min(state["count"] for state in states)
    late_ranks = [rank for rank, state in enumerate(states) if state["count"] == min_count]
    if len(late_ranks) == len(states):
        late_ranks = [rank for rank, state in enumerate(states) if not state["waits"]] or late_ranks
    if len(late_ranks) == len(states):
        return f"all ranks are in {states[0]['where']}"
    descriptions = [f"rank {rank} on {states[rank]['host']}" for rank in late_ranks[:4]]
    first_state = states[late_ranks[0]]
    verb = "is" if len(descriptions) == 1 else "are"
    position = f"which {verb} in {first_state['activity']} at {first_state['where']}"
    return f"waiting for {', '.join(descriptions)}, {position}"
