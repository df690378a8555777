"""Trace a few steps on every rank. The key `profile` sets the number of steps to trace.

Traces are Chrome JSON files, which you can open at ui.perfetto.dev and analyze with
results/lab/overlap.py. The first steps are not traced, because they compile, allocate memory and
capture graphs."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from distributed_training.engines.graphs import NUM_EAGER_STEPS
from distributed_training.plan.plan import Plan
from distributed_training.records.metrics import MAX_WARMUP_STEPS
from distributed_training.records.record import TRACE_FILE

if TYPE_CHECKING:
    from distributed_training.train.loop import Trainer


def steps_to_trace(plan: Plan, last_step: int) -> range:
    """Return the 1-based numbers of the steps to trace in a run that continues after `last_step`.

    The traced steps follow the warm-up. If the run is too short for the warm-up and the trace, the
    last steps are traced, except for the first one. Every other run traces no step that captures a
    graph."""
    num_traced = plan.config.profile
    end = (plan.num_steps or 0) + 1
    warm_up = NUM_EAGER_STEPS + 2 if plan.config.cuda_graphs else MAX_WARMUP_STEPS
    first = max(last_step + 2, min(last_step + warm_up + 1, end - num_traced))
    return range(first, min(first + num_traced, end))


class Profile:
    """Profiler that traces `steps` on this rank."""

    def __init__(self, steps: range) -> None:
        self._steps = steps

    def start(self, trainer: Trainer) -> None:
        # The profiler warms up in the step before the first traced step.
        wait = self._steps.start - trainer.step - 2
        self._profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(
                wait=wait, warmup=1, active=len(self._steps), repeat=1
            ),
            on_trace_ready=functools.partial(self._write, trainer),
        )
        self._profiler.start()

    def step(self) -> None:
        """Tell the profiler that a step has ended. After the last traced step, write the file."""
        self._profiler.step()

    def stop(self) -> None:
        """Stop the profiler and write the steps traced so far. After a rank has failed, the
        profilers of the other ranks could wait for that rank forever."""
        self._profiler.stop()

    def _write(
        self,
        trainer: Trainer,
        profiler: torch.profiler.profile,
    ) -> None:
        # Nothing was traced if a signal stopped the run before the first traced step ended.
        if trainer.step < self._steps[0]:
            return
        file = trainer.plan.run_dir / TRACE_FILE.format(trainer.topology.rank)
        profiler.export_chrome_trace(str(file))
        files = f"{TRACE_FILE.format('*')} in the run's folder (open at ui.perfetto.dev)"
        trainer.display.say(f"traced steps {self._steps[0]} to {trainer.step}: {files}")
