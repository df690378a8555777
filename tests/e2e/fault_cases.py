"""What processes of the fault tests run: the script, with something that goes wrong on the way.

tests.pool calls these on every rank; each returns the script's exit code to rank 0's caller.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from contextlib import suppress
from typing import Any

import torch

from distributed_training.engines import deepspeed, native
from distributed_training.parallel.gradients import local_part
from distributed_training.run import watch
from distributed_training.run.loop import Trainer
from distributed_training.run.saving import checkpoint, disks
from tests.e2e.support import run_script


def with_bad_gradient(job: dict[str, Any]) -> int:
    """On rank 1, in each of `steps`, a gradient (of `name`, native engines) or the loss (DeepSpeed)
    becomes NaN; on all ranks where DDP has made their gradients equal."""
    rank, calls, update = int(os.environ["RANK"]), [], native.NativeEngine.update

    def bad(everywhere: bool = False) -> bool:
        calls.append(None)
        return (everywhere or rank == 1) and len(calls) in job["steps"]

    def bad_update(self: Any) -> Any:
        if bad(self.copies_only):
            parameter = self.parameters[self.gradient_names.index(job["name"])]
            local_part(parameter.grad).fill_(float("nan"))
        return update(self)

    native.NativeEngine.update = bad_update
    for engine in (deepspeed.DeepSpeedEngine, deepspeed.DeepSpeedPipelineEngine):
        run = engine._run

        def bad_run(self: Any, batch: Any, scale: float, run: Any = run) -> torch.Tensor:
            factor = float("nan") if bad() else 1.0
            return run(self, batch, scale * factor) * factor

        engine._run = bad_run
    return run_script(job["arguments"])


def without_step(job: dict[str, Any]) -> int:
    """The batch of step `step` is left out."""
    right = Trainer.__post_init__

    def init(self: Trainer) -> None:
        right(self)
        self._passed_over = job["step"]

    Trainer.__post_init__ = init
    return run_script(job["arguments"])


def with_rank_1_stopped(job: dict[str, Any]) -> int:
    """In step 5 of rank 1 something stops; limits are short."""
    # On a busy machine a living thread may be silent for seconds.
    watch.BEAT_S, watch.LOST_S, watch.SLOW_S = 0.5, 10.0 if job["how"] == "frozen" else 60.0, 5.0
    right, calls = native.NativeEngine.train_step, []

    def train_step(self: Any, batch: Any) -> Any:
        calls.append(None)
        if len(calls) == 5 and os.environ["RANK"] == "1":
            time.sleep(2)  # for a sign of life from here
            if job["how"] == "frozen":
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(60)
        return right(self, batch)

    native.NativeEngine.train_step = train_step
    return run_script(job["arguments"])


def with_full_disk(job: dict[str, Any]) -> int:
    """The second checkpoint finds no room: on the disk itself, or by a limit of this process."""
    right, calls = checkpoint.Saver.begin, []

    def save(*arguments: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) == 2 and job["how"] == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        elif len(calls) == 2 and os.environ["RANK"] == "0":
            with open(job["disk"] + "/filled", "wb", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(bytes(4096))
        return right(*arguments, **options)

    checkpoint.Saver.begin = save
    return run_script(job["arguments"])


def with_disks_of_their_own(job: dict[str, Any]) -> int:
    """Rank 1 has another disk at `folder`, as on another machine."""
    disks.SHARED_WITHIN_S = 1.0
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    if os.environ["RANK"] == "1":
        libc, folder = ctypes.CDLL(None, use_errno=True), job["folder"].encode()
        private, new_mounts = 1 << 18 | 1 << 14, 0x20000  # MS_PRIVATE | MS_REC, CLONE_NEWNS
        done = libc.unshare(new_mounts) or libc.mount(b"none", b"/", None, private, None)
        done = done or libc.mount(b"tmpfs", folder, b"tmpfs", 0, None)
        assert done == 0, os.strerror(ctypes.get_errno())
    return run_script(job["arguments"])
