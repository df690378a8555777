"""Trace a few steps on every rank. The key `profile` sets the number of steps to trace.

Traces are Chrome JSON files, which you can open at ui.perfetto.dev. The first steps are not traced,
because they compile, allocate memory and capture graphs."""

from torch.profiler import profile, schedule

from distributed_training.engines.graphs import NUM_EAGER_STEPS
from distributed_training.plan.plan import Plan
from distributed_training.records.display import Display
from distributed_training.records.metrics import MAX_WARMUP_STEPS
from distributed_training.records.record import TRACE_FILE


def build_profiler(plan: Plan, last_step: int, rank: int, display: Display) -> profile | None:
    """Return a profiler for a run that continues after `last_step`, or None if less than two
    steps remain.

    The traced steps follow the warm-up. If the run is too short for the warm-up and the trace, the
    last steps are traced, except for the first one. Every other run traces no step that captures a
    graph."""
    num_traced = plan.config.profile
    num_steps = (plan.num_steps or 0) - last_step
    if num_steps < 2:
        return None
    warm_up = NUM_EAGER_STEPS + 2 if plan.config.cuda_graphs else MAX_WARMUP_STEPS
    # The profiler warms up in the step before the first traced step.
    wait = max(0, min(warm_up - 1, num_steps - num_traced - 1))

    def write(profiler: profile) -> None:
        profiler.export_chrome_trace(str(plan.run_dir / TRACE_FILE.format(rank)))
        files = f"{TRACE_FILE.format('*')} in the run's folder (open at ui.perfetto.dev)"
        display.say(f"traced steps from step {last_step + wait + 2}: {files}")

    return profile(
        schedule=schedule(wait=wait, warmup=1, active=num_traced, repeat=1), on_trace_ready=write
    )
