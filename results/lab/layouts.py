"""Many layouts in one process group, one after the other: speed, memory, bubble.

    torchrun --nproc_per_node=4 results/lab/layouts.py PLAN.json FOLDER

The plan is one of `compare`'s, but all runs share the processes, as starting them takes longer than
the steps that are timed. Each run leaves a record as a training does, with the
idle share of the pipeline's ranks in "bubble": what is left of a step's forward and backward phase
(phase_s, the median of the timed steps) when the time in which a rank computes is taken out. On
GPUs that is the time of the kernels in one more step under the profiler, which makes launching
slower, but not the kernels; copies count, too, but not NCCL's kernels, which run as long as they
wait. between_operations is the same by the begin and end of the stages' operations, in which
launching counts as computing; "parts" says where the idle share comes from (bubble.explain).
Exchanges of gradients and the optimizer follow that phase and are in
the step time only. Where a step is one CUDA graph, the step time is the graph's, and the idle share
that of further steps which are launched op by op.
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
from distributed_training.tools import harness
from distributed_training.train.worker import describe_run
from results.lab.analysis.bubble import bubble, explain
from results.lab.overlap import length, union
from results.lab.runs import Measured, Runs, collect, read_plan

NUM_STEPS = 12
NUM_WARMUP = 4  # steps that summarize_performance skips in a run of NUM_STEPS
COLUMNS = (
    "strategy", "batch", "tokens/s", "ms per step", "MFU", "peak GPU memory", "bubble",
    "ideal bubble", "status",
)  # fmt: skip
REDUCTION = "perform_reduce_grad"  # torch reduces over dp at the end of the phase
OPERATIONS = {  # of a stage, by kind
    "reduction": REDUCTION,
    "F": "forward_one_chunk",
    "B": "backward_one_chunk",  # or I, where a W follows
    "W": "backward_weight_one_chunk",
}
COMPUTING = ("F", "B", "W")


class LeftOver(NamedTuple):
    """Bytes of tensors, and of what the allocator holds, between two runs."""

    allocated: int
    reserved: int


class Spans:
    """Begin and end of calls, on the GPU's clock where there is one."""

    def __init__(self, device: torch.device, pipeline: Pipeline | None) -> None:
        """Every phase of the pipeline and every operation of its stages is marked from now on."""
        self.device = device
        self.marks: dict[tuple[str, int], list[tuple[Any, Any]]] = {}
        if pipeline is None:
            return
        self._watch(pipeline, "forward_backward", ("phase", 0))
        for stage in stages_of(pipeline):
            for kind, name in OPERATIONS.items():
                self._watch(stage, name, (kind, stage.stage_index))

    def _watch(self, owner: Any, name: str, place: tuple[str, int]) -> None:
        function = getattr(owner, name)

        def call(*arguments: Any, **words: Any) -> Any:
            begin = self._now()
            result = function(*arguments, **words)
            self.marks.setdefault(place, []).append((begin, self._now()))
            return result

        setattr(owner, name, call)

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, num_steps: int, *kinds: str) -> np.ndarray:
        """Of each of the steps since `marks` was emptied: the durations of all calls in it."""
        found = [self._durations(place) for place in self.marks if place[0] in kinds]
        # The same calls in every step.
        return sum((of.reshape(num_steps, -1).sum(1) for of in found), np.zeros(num_steps))

    def operations(self) -> dict[str, float]:
        """Median seconds of each kind of operation of each stage, by names such as "F 0"."""
        places = [place for place in self.marks if place[0] in COMPUTING]
        return {f"{k} {s}": float(np.median(self._durations((k, s)))) for k, s in places}

    def _durations(self, place: tuple[str, int]) -> np.ndarray:
        marks = self.marks[place]
        if self.device.type != "cuda":
            return np.array([end - begin for begin, end in marks])
        torch.cuda.synchronize(self.device)
        return np.array([begin.elapsed_time(end) / 1000 for begin, end in marks])


def pipeline_of(engine: Any) -> Pipeline | None:
    """The engine's pipeline, where it is ours."""
    found = getattr(engine, "pipeline", None)
    return found if isinstance(found, Pipeline) else None


def stages_of(pipeline: Pipeline) -> list[Any]:
    """This process's stages, as torch's schedule calls them."""
    schedule: Any = pipeline.schedule
    return [schedule._stage] if hasattr(schedule, "_stage") else list(schedule._stages)


def traced(engine: Any, batch: Any, topology: Topology) -> float | None:
    """Seconds in which this rank's GPU computed in the forward and backward phase of one more step;
    None without a GPU or a pipeline of ours. Collective. The run's last step: what torch reduces
    after the phase, but inside of it, is put off, so that the trace is without.
    """
    pipeline: Any = pipeline_of(engine)
    if pipeline is None or topology.device_type != "cuda":
        return None
    phase = pipeline.forward_backward
    put_off: list[Callable[[], Any]] = []
    found = []
    for stage in stages_of(pipeline):
        reduce = getattr(stage, REDUCTION)
        later = functools.partial(_put_off, put_off, reduce)
        setattr(stage, REDUCTION, later)

    def under_profiler(*arguments: Any) -> Any:
        dist.barrier()
        result, seconds = profiled(lambda: phase(*arguments))
        for call in put_off:
            call()
        found.append(seconds)
        return result

    pipeline.forward_backward = under_profiler
    engine.train_step(batch)
    return found[0]


def _put_off(calls: list[Callable[[], Any]], function: Any, *words: Any) -> None:
    calls.append(functools.partial(function, *words))


def profiled(function: Callable[[], Any]) -> tuple[Any, float]:
    """What `function` returns, and for how many seconds the GPU computed for it."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        result = function()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        return result, busy_seconds(json.loads(Path(file.name).read_text()))


def busy_seconds(trace: dict[str, Any]) -> float:
    """Of a Chrome trace, whose times are microseconds. Streams that compute at the same time count
    once."""
    spans = [
        (event["ts"], event["ts"] + event["dur"])
        for event in trace["traceEvents"]
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        and "nccl" not in event["name"].lower()
    ]
    if not spans:
        raise ValueError("the trace shows no kernel")
    return length(union(spans)) / 1e6


def measure(run: harness.Run) -> dict[str, Any]:
    """Train a few steps: what was measured on this rank; on rank 0 also what a record says."""
    config = run.plan.config
    topology = run.topology
    spans = Spans(topology.device, pipeline_of(run.engine))
    timer = StepTimer(topology.device)
    memory = PeakMemory(topology.device)
    memory.begin()
    for step in range(NUM_EAGER_STEPS + 1 if config.cuda_graphs else 0):  # up to the capture
        run.engine.train_step(run.batch(step))
    timer.restart()
    _train(run, spans, timer)
    memory.end()
    if config.cuda_graphs and topology.pp > 1:  # a graph does not say when its parts begin and end
        engine: Any = run.engine
        engine.step.graph = None
        _train(run, spans, StepTimer(topology.device))
    num_timed = NUM_STEPS - NUM_WARMUP
    phases, reductions, computing = (
        spans.seconds(num_timed, *kinds) for kinds in (("phase",), ("reduction",), COMPUTING)
    )
    found: dict[str, Any] = {
        "rank": topology.rank,
        **memory.as_dict(),
        "peak_host_bytes": None,  # the process's, with all runs before
        "phase_s": float(np.median(phases - reductions)),
        "computing_s": float(np.median(computing)),
        "operations_s": spans.operations(),
        "kernels_s": traced(run.engine, run.batch(NUM_STEPS), topology),
    }
    if topology.rank == 0:
        command = shlex.join(["python", *sys.argv])
        start = describe_run(replace(run.plan, command=command), run.sampler, run.data)
        dtypes = run.engine.describe_dtypes()
        found["start"] = {**start, "num_steps": NUM_STEPS, "dtypes": dtypes}
        found["order"] = find_orders(run.plan), run.plan.layout.ranks
        # As for a training. The last step of an epoch takes as long with fewer samples.
        found["performance"] = summarize_performance(
            timer.durations_s(),
            tokens_per_step=run.sampler.global_batch_size * config.max_length,
            flops_per_token=run.plan.size.flops_per_token(
                run.plan.attended, frozen=config.lora_rank > 0
            ),
            world_size=topology.world_size,
            device_name=run.plan.machine.gpu_name,
        )
    return found


def _train(run: harness.Run, spans: Spans, timer: StepTimer) -> None:
    for step in range(NUM_STEPS):
        if step in (0, NUM_WARMUP):
            spans.marks.clear()
        run.engine.train_step(run.batch(step))
        timer.mark()


def build_record(
    ranks: list[dict[str, Any]], folder: Any, before: list[LeftOver], after: list[LeftOver]
) -> dict[str, Any]:
    """The record of a run from what its ranks measured and what was left in their memory before and
    after it."""
    start, performance, (orders, stage_ranks) = (
        ranks[0].pop(name) for name in ("start", "performance", "order")
    )
    memory: dict[str, Any] = {"peak_host_bytes": None, "by_rank": ranks}
    leave_out_left_over(memory, before, after)
    idle = bubble(ranks) if start["mesh"]["pp"] > 1 and ranks[0]["phase_s"] else None
    if idle is not None and "between_operations" in idle:
        orders = [tuple(map(tuple, order)) for order in orders]  # as they were before JSON
        idle["parts"] = explain(idle, start["pipeline"], orders, stage_ranks)
    ended = {"status": "ok", "finished_at": timestamp(), "step": NUM_STEPS, "run_dir": ""}
    record = start_record(folder, **start)
    record.update(**ended, performance=performance, memory=memory, bubble=idle)
    return record.values


def leave_out_left_over(
    memory: dict[str, Any], before: list[LeftOver], after: list[LeftOver]
) -> None:
    """Add the peaks of the run itself, largest over the ranks, to what each rank measured.

    DeepSpeed's optimizers outlive their engines, and DDP's buffers do for a while. The smaller of
    both amounts is taken for what earlier runs left. Where a run frees some of it and leaves some
    of its own, that is too much; both amounts stay in the record.
    """
    for rank in memory["by_rank"]:
        old = before[rank["rank"]]
        new = after[rank["rank"]]
        rank["before_bytes"] = old.reserved
        rank["after_bytes"] = new.reserved
        rank["left_over_bytes"] = min(old.reserved, new.reserved)
        rank["left_allocated_bytes"] = min(old.allocated, new.allocated)
    for name, left in (("allocated", "left_allocated_bytes"), ("reserved", "left_over_bytes")):
        peaks = [(rank[f"peak_{name}_bytes"], rank[left]) for rank in memory["by_rank"]]
        known = peaks[0][0] is not None
        memory[f"peak_{name}_bytes"] = max(peak - of for peak, of in peaks) if known else None


def measure_each(group: harness.Group, runs: Runs, deadline_s: float) -> Iterator[Measured]:
    """Measure one run after the other; yields on every rank, records on rank 0. Collective."""
    before = _left_over()
    for name, found in harness.each_run(
        group, runs, measure, deadline_s=deadline_s, kept=harness.Kept()
    ):
        after = _left_over()
        if isinstance(found, str):
            yield name, f"refused: {found}"
        elif group.process.rank > 0:
            yield name, "rank 0 has the record"
        else:
            yield name, build_record(found, group.folder, before, after)
        before = after


def _left_over() -> list[LeftOver]:
    """What each rank's allocator cannot give back between two runs."""
    if not torch.cuda.is_available():
        mine = LeftOver(0, 0)
    else:
        mine = LeftOver(torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
    return [LeftOver(*each) for each in gather(mine)]


def main(argv: Sequence[str] | None = None) -> int:
    arguments, _, runs = read_plan("Many layouts in one process group, one after the other.", argv)
    with harness.open_group_for(runs) as group:
        measured = measure_each(group, runs, arguments.deadline_s)
        if group.process.rank == 0:
            collect(arguments, runs, measured, COLUMNS)
        else:
            collections.deque(measured, maxlen=0)  # take part
    return 0


if __name__ == "__main__":
    checkout.run(main)
