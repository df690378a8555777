"""`profile`: what every rank does in a few steps, as a trace; on a GPU also what is in its memory.

Traces are Chrome's JSON (ui.perfetto.dev opens them, results/lab/overlap.py reads them), snapshots
are for pytorch.org/memory_viz. The first steps compile, allocate and capture graphs, and
are left out.
"""

import os

import torch

from distributed_training.engines.graphs import NUM_EAGER_STEPS
from distributed_training.parallel.mesh import Topology
from distributed_training.parallel.private import dump_memory_history, record_memory_history
from distributed_training.plan.plan import Plan
from distributed_training.records.metrics import MAX_WARMUP_STEPS
from distributed_training.records.record import MEMORY_FILE, TRACE_FILE

SILENT = "6"  # the profiler's library would print when it starts and stops


def steps_to_trace(plan: Plan, done: int) -> range:
    """Which steps of a run that goes on after `done` are traced, counted from 1: the last of a run
    that is shorter than warm-up and trace; never its first, nor one that is captured."""
    config = plan.config
    left = (plan.num_steps or 0) - done
    warm_up = MAX_WARMUP_STEPS
    if config.cuda_graphs:  # the profiler's own warm-up follows the capture, too
        warm_up = NUM_EAGER_STEPS + 2
        if left < warm_up + config.profile:
            left = min(left, NUM_EAGER_STEPS)
    first = 1 + max(1, min(warm_up, left - config.profile))
    return range(done + first, done + min(first + config.profile, left + 1))


class Profile:
    """Tracing of `steps`, from after step `done` to `stop`; `step_ended` follows each step."""

    def __init__(self, plan: Plan, topology: Topology, done: int, steps: range) -> None:
        self.record: dict[str, object] | None = None  # of what was written
        # Those that are not timed: profiling begins before the first that is traced, and writing
        # ends within the one after the last.
        self.slowed = range(steps.start - 1, steps.stop + 1)
        self._steps = steps
        self._done = done
        self._on_gpu = topology.device_type == "cuda"
        self._rank = topology.rank
        self._run_dir = plan.run_dir
        if self._rank == 0:  # of an earlier start, perhaps with more processes
            for name in (TRACE_FILE, MEMORY_FILE):
                for file in self._run_dir.glob(name.format("*")):
                    file.unlink()
        os.environ.setdefault("KINETO_LOG_LEVEL", SILENT)
        wait = steps.start - done - 2  # the step before is the profiler's warm-up
        self._profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=wait, warmup=1, active=len(steps), repeat=1),
            on_trace_ready=self._write,
        )
        self._profiler.start()

    def step_ended(self) -> None:
        """Go on to the next step; the files are written after the last."""
        self._done += 1
        if self._on_gpu and self._done == self._steps[0] - 1:
            record_memory_history()
        self._profiler.step()

    def stop(self) -> None:
        """After a signal, what there is by then is written. Not to be called once one process has
        failed: the profiler of another could wait for it for ever."""
        self._profiler.stop()

    def _write(self, profiler: torch.profiler.profile) -> None:
        if self._done < self._steps[0]:  # a signal came before the first one ended
            return
        if self._on_gpu:
            dump_memory_history(self._run_dir / MEMORY_FILE.format(self._rank))
        profiler.export_chrome_trace(str(self._run_dir / TRACE_FILE.format(self._rank)))
        memory = MEMORY_FILE.format("*") if self._on_gpu else None
        self.record = {
            "first_step": self._steps[0], "last_step": self._done,
            "traces": TRACE_FILE.format("*"), "memory": memory,
        }  # fmt: skip
