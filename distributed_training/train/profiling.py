"""Trace a few steps on every rank and, on GPUs, record the memory history. The key `profile` sets
the number of steps to trace.

Traces are Chrome JSON files, which you can open at ui.perfetto.dev and analyze with
results/lab/overlap.py. You can open memory snapshots at pytorch.org/memory_viz. The first steps are
not traced, because they compile, allocate memory and capture graphs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from distributed_training.engines.graphs import NUM_EAGER_STEPS
from distributed_training.parallel.mesh import Topology
from distributed_training.parallel.private import dump_memory_history, record_memory_history
from distributed_training.plan.plan import Plan
from distributed_training.records.metrics import MAX_WARMUP_STEPS
from distributed_training.records.record import MEMORY_FILE, TRACE_FILE
from distributed_training.train.callbacks import Callback

if TYPE_CHECKING:
    from distributed_training.train.loop import Trainer

SILENT_LOG_LEVEL = "6"  # log level at which Kineto prints nothing


def steps_to_trace(plan: Plan, last_step: int) -> range:
    """Return the 1-based numbers of the steps to trace in a run that continues after `last_step`.

    The traced steps follow the warm-up. If the run is too short for the warm-up and the trace, the
    last possible steps are traced. The first step and the step that captures a graph are never
    traced."""
    config = plan.config
    num_remaining = (plan.num_steps or 0) - last_step
    warm_up = MAX_WARMUP_STEPS
    if config.cuda_graphs:  # The profiler needs its own warm-up step after the capture.
        warm_up = NUM_EAGER_STEPS + 2
        if num_remaining < warm_up + config.profile:
            num_remaining = min(num_remaining, NUM_EAGER_STEPS)
    first = 1 + max(1, min(warm_up, num_remaining - config.profile))
    return range(last_step + first, last_step + min(first + config.profile, num_remaining + 1))


class Profile(Callback):
    """Profiler that traces `steps` in a run that continues after `last_step`."""

    def __init__(self, plan: Plan, topology: Topology, last_step: int, steps: range) -> None:
        self._steps = steps
        self._last_done_step = last_step
        self._on_gpu = topology.device_type == "cuda"
        self._rank = topology.rank
        self._run_dir = plan.run_dir
        # Remove the files from an earlier attempt, which may have had more processes.
        if self._rank == 0:
            for name in (TRACE_FILE, MEMORY_FILE):
                for file in self._run_dir.glob(name.format("*")):
                    file.unlink()
        os.environ.setdefault("KINETO_LOG_LEVEL", SILENT_LOG_LEVEL)
        # The profiler warms up in the step before the first traced step.
        wait = steps.start - last_step - 2
        self._profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=wait, warmup=1, active=len(steps), repeat=1),
            on_trace_ready=self._write,
        )

    def before_training(self, trainer: Trainer) -> None:
        self._display = trainer.display
        self._profiler.start()

    def after_step(self, trainer: Trainer) -> None:
        """Tell the profiler that a step has ended. After the last traced step, write the files."""
        self._last_done_step += 1
        if self._on_gpu and self._last_done_step == self._steps[0] - 1:
            record_memory_history()
        self._profiler.step()

    def after_training(self, trainer: Trainer) -> None:
        """Stop the profiler and write the steps traced so far. After a rank has failed, the
        profilers of the other ranks could wait for that rank forever."""
        self._profiler.stop()

    def _write(self, profiler: torch.profiler.profile) -> None:
        # Nothing was traced if a signal stopped the run before the first traced step ended.
        if self._last_done_step < self._steps[0]:
            return
        if self._on_gpu:
            dump_memory_history(self._run_dir / MEMORY_FILE.format(self._rank))
        profiler.export_chrome_trace(str(self._run_dir / TRACE_FILE.format(self._rank)))
        files = f"{TRACE_FILE.format('*')} in the run's folder (open at ui.perfetto.dev)"
        self._display.say(f"traced steps {self._steps[0]} to {self._last_done_step}: {files}")
