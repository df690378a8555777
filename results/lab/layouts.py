"""Measure the speed, memory and bubble of many layouts in one process group.

    torchrun --nproc_per_node=4 results/lab/layouts.py PLAN.json FOLDER

The plan has the same format as the plans of `compare`. All runs share the processes, because
starting processes takes longer than the timed steps. Each run writes a record, as training does.

The "bubble" entry of a record holds the idle share of the pipeline's ranks. The forward and
backward phase takes `phase_s` (median of the timed steps). A rank is idle while it computes nothing
in this phase.

- On GPUs, a rank counts as computing while kernels and copies run in one additional step under the
  profiler. The profiler slows down kernel launches, but not the kernels. NCCL kernels do not
  count, because they also run while they wait.
- `between_operations` uses the start and end of the stages' operations instead. In this
  measurement, kernel launches count as computing.
- `parts` splits the idle share by cause (analysis/bubble.py).

Gradient reduction and the optimizer count only toward the step time, not toward the phase. If a
step is one CUDA graph, the step time is the time of the graph. The idle share then comes from
additional steps without the graph.
"""

import collections
import functools
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import checkout
import numpy as np
import torch
import torch.distributed as dist

from distributed_training.engines.graphs import NUM_EAGER_STEPS
from distributed_training.parallel.agree import gather
from distributed_training.parallel.mesh import Topology
from distributed_training.parallel.pipeline import Pipeline
from distributed_training.plan.orders import find_orders
from distributed_training.records.metrics import PeakMemory, StepTimer, summarize_performance
from distributed_training.records.record import start_record, timestamp
from distributed_training.train.run import describe_run
from results.lab import harness
from results.lab.analysis.bubble import bubble, explain
from results.lab.runs import Measured, Runs, collect, read_plan

NUM_STEPS = 12
NUM_WARMUP = 4  # steps that summarize_performance skips in a run of NUM_STEPS
COLUMNS = (
    "strategy", "batch", "tokens/s", "ms per step", "MFU", "reserved GPU memory", "bubble",
    "ideal bubble", "status",
)  # fmt: skip
REDUCTION_METHOD = (
    "perform_reduce_grad"  # PyTorch reduces gradients over dp at the end of the phase.
)
STAGE_METHODS = {  # kind -> method of PyTorch's pipeline stage
    "reduction": REDUCTION_METHOD,
    "F": "forward_one_chunk",
    "B": "backward_one_chunk",  # input gradients only (I) if a W follows
    "W": "backward_weight_one_chunk",
}
COMPUTE_KINDS = ("F", "B", "W")


class LeftOver(NamedTuple):
    """GPU memory in use between two runs: the bytes allocated to tensors, and the bytes reserved by
    the allocator."""

    allocated: int
    reserved: int


class CallTimer:
    """Records when calls start and end. Times are on the GPU's clock if there is a GPU."""

    def __init__(self, device: torch.device, pipeline: Pipeline | None) -> None:
        """Start recording every phase of the pipeline and every operation of its stages."""
        self.device = device
        self.marks: dict[tuple[str, int], list[tuple[Any, Any]]] = {}
        if pipeline is None:
            return
        self._record_calls(pipeline, "forward_backward", ("phase", 0))
        for stage in stages_of(pipeline):
            for kind, name in STAGE_METHODS.items():
                self._record_calls(stage, name, (kind, stage.stage_index))

    def _record_calls(self, owner: Any, name: str, key: tuple[str, int]) -> None:
        function = getattr(owner, name)

        def call(*arguments: Any, **kwargs: Any) -> Any:
            begin = self._mark()
            result = function(*arguments, **kwargs)
            self.marks.setdefault(key, []).append((begin, self._mark()))
            return result

        setattr(owner, name, call)

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, num_steps: int, *kinds: str) -> np.ndarray:
        """Return the total duration in seconds of all calls of the given kinds, for each step
        since `marks` was cleared."""
        durations = [self._durations(key) for key in self.marks if key[0] in kinds]
        # Every step has the same calls.
        return sum(
            (kind_durations.reshape(num_steps, -1).sum(1) for kind_durations in durations),
            np.zeros(num_steps),
        )

    def operations(self) -> dict[str, float]:
        """Return the median duration in seconds of each operation of each stage, keyed by names
        such as "F 0"."""
        keys = [key for key in self.marks if key[0] in COMPUTE_KINDS]
        return {f"{k} {s}": float(np.median(self._durations((k, s)))) for k, s in keys}

    def _durations(self, key: tuple[str, int]) -> np.ndarray:
        marks = self.marks[key]
        if self.device.type != "cuda":
            return np.array([end - begin for begin, end in marks])
        torch.cuda.synchronize(self.device)
        return np.array([begin.elapsed_time(end) / 1000 for begin, end in marks])


def pipeline_of(engine: Any) -> Pipeline | None:
    """Return the engine's pipeline, or None if the engine has no pipeline or uses DeepSpeed's."""
    pipeline = getattr(engine, "pipeline", None)
    return pipeline if isinstance(pipeline, Pipeline) else None


def stages_of(pipeline: Pipeline) -> list[Any]:
    """Return this process's stages from PyTorch's schedule."""
    schedule: Any = pipeline.schedule
    return [schedule._stage] if hasattr(schedule, "_stage") else list(schedule._stages)


def trace_phase(engine: Any, batch: Any, topology: Topology) -> float | None:
    """Run one additional step, the last of the run, under the profiler. Return the number of
    seconds during which this rank's GPU computes in the forward and backward phase. Return None if
    there is no GPU or the engine does not use our pipeline. All ranks must call this function.

    PyTorch reduces gradients at the end of the phase. This reduction is postponed, so the trace
    does not contain it."""
    pipeline: Any = pipeline_of(engine)
    if pipeline is None or topology.device_type != "cuda":
        return None
    run_phase = pipeline.forward_backward
    postponed_calls: list[Callable[[], Any]] = []
    phase_seconds = []
    for stage in stages_of(pipeline):
        reduce = getattr(stage, REDUCTION_METHOD)
        postpone = functools.partial(_postpone, postponed_calls, reduce)
        setattr(stage, REDUCTION_METHOD, postpone)

    def profile_phase(*arguments: Any) -> Any:
        dist.barrier()
        result, seconds = measure_gpu_seconds(lambda: run_phase(*arguments))
        for call in postponed_calls:
            call()
        phase_seconds.append(seconds)
        return result

    pipeline.forward_backward = profile_phase
    engine.train_step(batch)
    return phase_seconds[0]


def _postpone(calls: list[Callable[[], Any]], function: Any, *arguments: Any) -> None:
    calls.append(functools.partial(function, *arguments))


def measure_gpu_seconds(function: Callable[[], Any]) -> tuple[Any, float]:
    """Call a function. Return its result and the GPU's busy time in seconds."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        result = function()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        return result, busy_seconds(json.loads(Path(file.name).read_text()))


def busy_seconds(trace: dict[str, Any]) -> float:
    """Return the number of seconds during which kernels or copies run in a Chrome trace. The
    trace's times are in microseconds. NCCL kernels do not count, and overlapping kernels count
    once. Raises ValueError if the trace has no kernels."""
    spans = [
        (event["ts"], event["ts"] + event["dur"])
        for event in trace["traceEvents"]
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        and "nccl" not in event["name"].lower()
    ]
    if not spans:
        raise ValueError("the trace shows no kernel")
    busy_us = 0.0
    last_end = -float("inf")
    for begin, end in sorted(spans):
        busy_us += max(0.0, end - max(begin, last_end))
        last_end = max(last_end, end)
    return busy_us / 1e6


def measure(run: harness.Run) -> dict[str, Any]:
    """Train for a few steps. Return this rank's measurements and, on rank 0, also parts of the
    record."""
    config = run.plan.config
    topology = run.topology
    spans = CallTimer(topology.device, pipeline_of(run.engine))
    timer = StepTimer(topology.device)
    memory = PeakMemory(topology.device)
    memory.begin()
    for step in range(NUM_EAGER_STEPS + 1 if config.cuda_graphs else 0):  # until the capture
        run.engine.train_step(run.batch(step))
    timer.restart()
    _train(run, spans, timer)
    memory.end()
    if (
        config.cuda_graphs and topology.pp > 1
    ):  # A graph does not show when its parts begin and end.
        engine: Any = run.engine
        engine.step_graph.graph = None
        _train(run, spans, StepTimer(topology.device))
    num_timed = NUM_STEPS - NUM_WARMUP
    phases, reductions, computing = (
        spans.seconds(num_timed, *kinds) for kinds in (("phase",), ("reduction",), COMPUTE_KINDS)
    )
    measured: dict[str, Any] = {
        "rank": topology.rank,
        **memory.as_dict(),
        "peak_host_bytes": None,  # The process's peak includes all earlier runs.
        "phase_s": float(np.median(phases - reductions)),
        "computing_s": float(np.median(computing)),
        "operations_s": spans.operations(),
        "kernels_s": trace_phase(run.engine, run.batch(NUM_STEPS), topology),
    }
    if topology.rank == 0:
        command = shlex.join(["python", *sys.argv])
        start = describe_run(replace(run.plan, command=command), run.sampler, run.data)
        measured["start"] = {**start, "num_steps": NUM_STEPS}
        measured["order"] = find_orders(run.plan), run.plan.stages.ranks
        # Count full steps, as in training. The last step of an epoch has fewer samples.
        measured["performance"] = summarize_performance(
            timer.durations_s(),
            tokens_per_step=run.sampler.global_batch_size * config.max_length,
            flops_per_token=run.plan.size.flops_per_token(
                run.plan.attention_span, frozen=config.lora_rank > 0
            ),
            world_size=topology.world_size,
            device_name=run.plan.machine.gpu_name,
        )
    return measured


def _train(run: harness.Run, spans: CallTimer, timer: StepTimer) -> None:
    for step in range(NUM_STEPS):
        if step in (0, NUM_WARMUP):
            spans.marks.clear()
        run.engine.train_step(run.batch(step))
        timer.mark()


def build_record(
    ranks: list[dict[str, Any]], folder: Any, before: list[LeftOver], after: list[LeftOver]
) -> dict[str, Any]:
    """Build a run's record from the measurements of its ranks and from the memory in use on each
    rank before and after the run."""
    start, performance, (orders, stage_ranks) = (
        ranks[0].pop(name) for name in ("start", "performance", "order")
    )
    memory: dict[str, Any] = {"peak_host_bytes": None, "by_rank": ranks}
    subtract_left_over(memory, before, after)
    idle = bubble(ranks) if start["mesh"]["pp"] > 1 and ranks[0]["phase_s"] else None
    if idle is not None and "between_operations" in idle:
        orders = [tuple(map(tuple, order)) for order in orders]  # JSON turned tuples into lists.
        idle["parts"] = explain(idle, start["pipeline"], orders, stage_ranks)
    end_fields = {"status": "ok", "finished_at": timestamp(), "step": NUM_STEPS, "run_dir": ""}
    record = start_record(folder, **start)
    record.update(**end_fields, performance=performance, memory=memory, bubble=idle)
    return record.values


def subtract_left_over(
    memory: dict[str, Any], before: list[LeftOver], after: list[LeftOver]
) -> None:
    """Add the run's own peaks to `memory`: the highest peak of any rank, without memory left over
    from earlier runs.

    DeepSpeed's optimizers outlive their engines, and DDP's buffers remain for a while. The leftover
    memory is estimated as the smaller of the amounts before and after the run. The estimate is too
    large if a run frees old memory and leaves new memory behind. The record keeps both amounts."""
    for rank in memory["by_rank"]:
        old = before[rank["rank"]]
        new = after[rank["rank"]]
        rank["before_bytes"] = old.reserved
        rank["after_bytes"] = new.reserved
        rank["left_over_bytes"] = min(old.reserved, new.reserved)
        rank["left_allocated_bytes"] = min(old.allocated, new.allocated)
    for name, key in (("allocated", "left_allocated_bytes"), ("reserved", "left_over_bytes")):
        peaks = [(rank[f"peak_{name}_bytes"], rank[key]) for rank in memory["by_rank"]]
        is_measured = peaks[0][0] is not None
        memory[f"peak_{name}_bytes"] = (
            max(peak - old for peak, old in peaks) if is_measured else None
        )


def measure_each(group: harness.Group, runs: Runs, deadline_s: float) -> Iterator[Measured]:
    """Measure the runs one after another. For each run, yield the run's name and a result. If the
    run was refused, the result is an error message. Otherwise, the result is the record on rank 0,
    and a short message on the other ranks. All ranks must iterate over the generator."""
    before = _gather_left_over()
    for name, result in harness.each_run(
        group, runs, measure, deadline_s=deadline_s, run_cache=harness.RunCache()
    ):
        after = _gather_left_over()
        if isinstance(result, str):
            yield name, f"refused: {result}"
        elif group.process.rank > 0:
            yield name, "rank 0 has the record"
        else:
            yield name, build_record(result, group.folder, before, after)
        before = after


def _gather_left_over() -> list[LeftOver]:
    """Return the memory that each rank's allocator still holds between two runs. All ranks must
    call this function."""
    if not torch.cuda.is_available():
        local = LeftOver(0, 0)
    else:
        local = LeftOver(torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
    return [LeftOver(*sizes) for sizes in gather(local)]


def main(argv: Sequence[str] | None = None) -> int:
    arguments, _, runs = read_plan("Measure many layouts in one process group.", argv)
    with harness.open_group_for(runs) as group:
        measured = measure_each(group, runs, arguments.deadline_s)
        if group.process.rank == 0:
            collect(arguments, runs, measured, COLUMNS)
        else:
            collections.deque(measured, maxlen=0)  # Take part in the collectives.
    return 0


if __name__ == "__main__":
    checkout.run(main)
