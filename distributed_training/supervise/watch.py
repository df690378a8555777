"""Signs of life: threads of each process tell the others where it is, and end it when its launcher,
another process, or all progress is gone.

Every process writes what it is doing to the process group's store and reads what the next rank
wrote; so whoever is frozen or cut off is missed by one other. Rank 0 also looks at how long a step
takes. Time in which this process did not run itself, as after Ctrl-Z, does not count."""

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
import traceback
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
from distributed_training.settings.errors import RunError
from distributed_training.supervise import claims
from distributed_training.supervise.process import LAUNCHER, Process

THE_END = "the end"  # where each rank is once the model is written
BEAT_S = 2.0
LEAST_S = 60.0  # that a step may take, or 20 times what steps take
UNKNOWN_S = 600.0  # what else may take
LOST_S = 30.0  # without a sign of life from another process
NOTED_WITHIN_S = 10.0  # who failed and is silent since had time to say why
SLOW_S = 45.0  # of one step, after which rank 0 says who is waited for
GRACE_S = 10.0  # to save in, once the launcher is gone
# Modules whose functions wait for other ranks: collectives, or what has some inside of it. Not
# DeepSpeed's that work for long by themselves: its Adam on the CPU, files on the disk.
_WAITING = (
    "torch.distributed.", "torch.autograd.", "torch.nn.parallel.", "torch._ops",
    "deepspeed.comm.", "deepspeed.runtime.zero.", "deepspeed.runtime.pipe.",
)  # fmt: skip
_WRAPPER = "deepspeed.utils.nvtx"  # of DeepSpeed's functions, those that wait among them
_LAUNCHED = (LAUNCHER, "TORCHELASTIC_RUN_ID", "LOCAL_SIZE")  # by us, torchrun, deepspeed


class Watch:
    """The threads of one process. `at` is called by the main thread, wherever it comes to."""

    def __init__(self, process: Process) -> None:
        if os.environ.get(LAUNCHER, str(os.getppid())) != str(os.getppid()):
            sys.exit(128 + signal.SIGTERM)  # it was killed before it could be watched
        self.launchers = find_launchers() if any(map(os.environ.get, _LAUNCHED)) else []
        self.main = threading.get_ident()
        self.run_dir = Path(os.devnull)  # until it is known, in which nothing can be noted
        self.rank = process.rank
        self.world_size = process.world_size
        self._following = (process.rank + 1) % process.world_size  # whom this one watches
        self._given_s: float | None = None
        self._least_s = 0.0
        self._steps_s: deque[float] = deque(maxlen=1000)  # how long the last took, to the second
        self._place = "starting"
        self._since = 0.0
        self._count = 0  # places since the start, which nothing limits
        self._is_step = False
        self._thread = self.main
        self._clock = 0.0  # seconds that this process has been running, by the thread that watches
        self._others: dict[int, dict[str, Any]] = {}
        self._heard = self._answered = float("inf")
        self._said_slow = 0
        self._far = process.rank != process.local_rank  # from the store, on the first node
        self._ended = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    def begin(self, run_dir: Path, config: RunConfig, store: dist.Store) -> None:
        """The run is known; from now on the others are watched, too."""
        claims.hold(run_dir)
        self.run_dir = run_dir
        self._given_s = config.hang_timeout_s
        # Compilers and traces hold up a step now and then.
        self._least_s = UNKNOWN_S if config.compile or config.profile else LEAST_S
        self._heard = self._answered = self._clock
        threading.Thread(target=self._beat, args=[store], daemon=True).start()

    def at(self, place: str, *, is_step: bool = False, thread: int | None = None) -> None:
        """The main thread begins something, or to wait for another `thread` that does it."""
        if self._is_step:
            self._steps_s.append(self._clock - self._since)
        self._is_step = is_step
        self._thread = thread or self.main
        self._place = place
        self._since = self._clock
        self._count += 1

    @property
    def place(self) -> str:
        """Where the main thread is."""
        return self._place

    @property
    def limit_s(self) -> float:
        """How long the run may be where it is; 0: for ever."""
        if self._given_s is not None:
            compiles = self._is_step and not self._steps_s and self._least_s == UNKNOWN_S
            return max(self._given_s, UNKNOWN_S) if self._given_s and compiles else self._given_s
        if self.world_size == 1:  # whoever started it sees where it is, in a debugger, say
            return 0.0
        if self._is_step and self._steps_s:
            return max(self._least_s, 20 * statistics.median(self._steps_s))
        return UNKNOWN_S

    def end(self) -> None:
        """Nothing is watched any more."""
        self._ended.set()

    def _beat(self, of_main: dist.Store) -> None:
        """Write and read signs of life. May block where the store does not answer."""
        store = dist.PrefixStore("watch", of_main.clone())  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=LOST_S))
        beats = 0
        while beats == 0 or not self._ended.wait(BEAT_S):
            beats += 1
            if self.rank == 0:
                try:
                    claims.renew(self.run_dir)
                except RunError as error:
                    self._give_up(str(error), 0)
            try:
                store.set(str(self.rank), json.dumps({"beat": beats, **self._describe()}))
                wanted = {self._following}
                if self.rank == 0 and self._clock - self._since > SLOW_S / 2:
                    wanted.update(range(self.world_size))
                there = (rank for rank in sorted(wanted) if store.check([str(rank)]))
                found = {rank: json.loads(store.get(str(rank))) for rank in there}
            except (RuntimeError, ValueError):
                return  # the connection is gone for good, which _look notices
            self._answered = self._clock
            if found.get(self._following) != self._others.get(self._following):
                self._heard = self._clock
            self._others |= found

    def _describe(self) -> dict[str, Any]:
        """Where this process is, for the others."""
        frames = sys._current_frames()
        waits = None
        where = ""
        for frame, line in traceback.walk_stack(frames.get(self._thread, frames[self.main])):
            file = frame.f_code.co_filename
            module = str(frame.f_globals.get("__name__"))
            if waits is None and module != _WRAPPER:  # the innermost one
                waits = module.startswith(_WAITING)
            if "distributed_training/" in file:
                where = f"{Path(file).name}:{line} {frame.f_code.co_name}"
                break
        return {
            "host": platform.node(), "pid": os.getpid(), "place": self._place,
            "count": self._count, "waits": bool(waits), "where": where,
        }  # fmt: skip

    def _look(self) -> None:
        """Once a second: is everybody there, and does it go on?"""
        before = time.monotonic()
        orphaned = 0.0
        while not self._ended.wait(1.0):
            now = time.monotonic()
            self._clock += min(now - before, 2.0)
            before = now
            if not orphaned and not all(map(_lives, self.launchers)):
                orphaned = self._clock
                pids = ", ".join(str(process.pid) for process in self.launchers)
                reason = f"the launcher (process {pids}) was killed"
                mark_stopped(self.run_dir, "interrupted", reason)
                # Training saves and ends; before and after it the process just ends.
                os.kill(os.getpid(), signal.SIGTERM)
            elif orphaned and self._clock - orphaned > GRACE_S:
                os._exit(128 + signal.SIGTERM)
            if self.world_size > 1:
                self._look_at_others()
            if self.rank == 0 and self._count:
                self._look_at_progress(self._clock - self._since)

    def _look_at_others(self) -> None:
        here = platform.node()
        silent = f"shows no sign of life for {LOST_S:.0f} s"
        noted_s = LOST_S - NOTED_WITHIN_S
        if self._clock - self._answered > LOST_S:
            first = os.environ["MASTER_ADDR"]
            reason = f"rank {self.rank} on {here} lost rank 0 on {first}: it {silent}"
            launchers = self.launchers[:1] if self._far else []  # which would wait for minutes
            self._give_up(reason, noted_s, [each.pid for each in launchers])
        # The store answers; one that does not is itself what is lost, a moment from now.
        if self._clock - self._heard > LOST_S > 2 * (self._clock - self._answered):
            other = self._others.get(self._following, {})
            at = f"rank {self._following}" + (f" on {other['host']}" if other else "")
            reason = f"lost {at} in {self._place}: it {silent}, is frozen or cut off"
            # Frozen, it would not hear SIGTERM.
            self._give_up(reason, noted_s, [other["pid"]] if other.get("host") == here else [])

    def _look_at_progress(self, seconds: float) -> None:
        found = {**self._others, 0: self._describe()}  # its own is old where the store is slow
        states = [found[rank] for rank in sorted(found)]
        limit_s = self.limit_s
        if seconds > SLOW_S and self._said_slow != self._count and len(states) == self.world_size:
            self._said_slow = self._count
            said = f"{self._place} has taken {seconds:.0f} s: {who_is_late(states)}"
            if limit_s:
                said += f"; after {limit_s:g} s (hang_timeout_s) the run ends"
            print(f"note: {said}", file=sys.stderr, flush=True)
        if limit_s and seconds > limit_s:
            said = f"{self._place} hangs for {seconds:.0f} s: {who_is_late(states)}"
            self._give_up(said, seconds)

    def _give_up(self, reason: str, ago_s: float, others: Sequence[int] = ()) -> NoReturn:
        """Report, kill these processes, and end this one; its launcher then ends the rest."""
        with contextlib.suppress(OSError):  # a full disk
            mark_stopped(self.run_dir, "failed", reason, ago_s=ago_s)
            get_error_handler().record_exception(RunError(reason))
        finished = self._place == THE_END and has_finished(self.run_dir)
        word = "note: after the run had finished" if finished else "error"
        print(f"{word}: {reason}", file=sys.stderr, flush=True)
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os._exit(0 if finished else 1)


def find_launchers() -> list[psutil.Process]:
    """The parent, and those of deepspeed's launcher above it."""
    parents = psutil.Process().parents()
    above = itertools.takewhile(lambda each: "deepspeed" in " ".join(each.cmdline()), parents[1:])
    return [*parents[:1], *above]


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def who_is_late(states: Sequence[Mapping[str, Any]]) -> str:
    """Whom the other ranks wait for: the furthest behind; of equals, those in no collective."""
    least = min(state["count"] for state in states)
    late = [rank for rank, state in enumerate(states) if state["count"] == least]
    if len(late) == len(states):
        late = [rank for rank, state in enumerate(states) if not state["waits"]] or late
    if len(late) == len(states):
        return f"all ranks are in {states[0]['where']}"
    named = [f"rank {rank} on {states[rank]['host']}" for rank in late[:4]]
    first = states[late[0]]
    return f"waiting for {', '.join(named)}, in {first['place']} at {first['where']}"
