"""Many layouts in one process group, one after the other: speed, memory, bubble.

    torchrun --nproc_per_node=4 real_model_example.py measure layouts PLAN.json OUT.json
    python real_model_example.py measure runs --unpack OUT.json results/records/h200-x4-layouts

A plan is JSON: {"common": {CONFIG keys}, "runs": [{CONFIG keys}, ...]}. Starting processes takes
longer than the steps that are timed, so all runs share them; engines, data and clipping are those
of real_model_example.py. Each run leaves a record as a training does, with what it measured of the
pipeline in "bubble": idle_share is what is left of a step's forward and backward phase (phase_s,
the median of the timed steps) when the time in which a rank computes is taken out, on GPUs that of
the kernels in one more step under the profiler; between_operations is the same by the begin and
end of the stages' operations, in which launching counts as computing. Exchanges of gradients and
the optimizer follow that phase and are in the step time only.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from distributed_training.measure.bubble import REDUCTION, Spans, bubble, traced
from distributed_training.measure.harness import (
    Run,
    each_run,
    gather,
    open_group,
    share_between_runs,
)
from distributed_training.records.metrics import PeakMemory, StepTimer, summarise_performance
from distributed_training.records.record import start_record, timestamp, write_json
from distributed_training.records.schema import Record
from distributed_training.records.tables import table
from distributed_training.run.assemble import describe_run

NUM_STEPS, NUM_WARMUP = 12, 4  # summarise_performance leaves out as many of so many
COLUMNS = (
    "strategy", "batch", "tokens/s", "ms a step", "MFU", "peak GPU memory", "bubble",
    "ideal bubble", "status",
)  # fmt: skip


def measure(run: Run, spans: Spans) -> dict[str, Any]:
    """Train a few steps: what was measured on this rank; on rank 0 also what a record says."""
    config, topology = run.plan.config, run.topology
    timer, memory = StepTimer(topology.device), PeakMemory(topology.device)
    memory.begin()
    timer.restart()
    for step in range(NUM_STEPS):
        if step in (0, NUM_WARMUP):
            spans.marks.clear()
        run.engine.train_step(run.batch(step))
        timer.mark()
    memory.end()
    timed = NUM_STEPS - NUM_WARMUP
    phases, reductions, computing = (
        spans.seconds(kind, timed) for kind in ("Pipeline", REDUCTION, "PipelineStage")
    )
    durations = timer.durations_s()
    found: dict[str, Any] = {
        "rank": topology.rank,
        **memory.as_dict(),
        "peak_host_bytes": None,  # the process's, with all runs before
        "phase_s": median(a - b for a, b in zip(phases, reductions, strict=True)),
        "computing_s": median(computing),
        "kernels_s": traced(run.engine, run.batch(NUM_STEPS), topology),
    }
    if topology.rank == 0:
        start = describe_run(run.plan, run.sampler, NUM_STEPS, run.data)
        found["start"] = {**start, "dtypes": run.engine.describe_dtypes()}
        # As for a training. The last step of an epoch takes as long with fewer samples.
        found["performance"] = summarise_performance(
            durations,
            tokens_per_step=run.sampler.global_batch_size * config.max_length,
            flops_per_token=run.plan.size.flops_per_token(config.max_length),
            world_size=topology.world_size,
            device_name=run.plan.machine.gpu_name,
        )
    return found


def build_record(
    ranks: list[dict[str, Any]], folder: Path, before: list[int], after: list[int]
) -> dict[str, Any]:
    """The record of a run from what its ranks measured and what their allocators could not give
    back before and after it."""
    start, performance = ranks[0].pop("start"), ranks[0].pop("performance")
    memory: dict[str, Any] = {"peak_host_bytes": None, "by_rank": ranks}
    pipelined = start["mesh"]["pp"] > 1 and ranks[0]["phase_s"]
    idle = bubble(ranks) if pipelined else None
    leave_out_left_over(memory, before, after)
    record = start_record(folder, **start)
    record.update(
        status="ok",
        finished_at=timestamp(),
        step=NUM_STEPS,
        run_dir="",
        performance=performance,
        memory=memory,
        bubble=idle,
    )
    return record.values


def left_over() -> list[int]:
    """Bytes that each rank's allocator cannot give back between two runs."""
    return gather(torch.cuda.memory_reserved() if torch.cuda.is_available() else 0)


def leave_out_left_over(memory: dict[str, Any], before: list[int], after: list[int]) -> None:
    """Add the peaks of the run itself, largest over the ranks, to what each rank measured.

    DeepSpeed's optimizers outlive their engines, and DDP's buffers do for a while. The smaller of
    both amounts is taken for what earlier runs left. Where a run frees some of it and leaves some
    of its own, that is too much; both amounts stay in the record.
    """
    for rank in memory["by_rank"]:
        rank["before_bytes"], rank["after_bytes"] = before[rank["rank"]], after[rank["rank"]]
        rank["left_over_bytes"] = min(rank["before_bytes"], rank["after_bytes"])
    for name in ("peak_allocated_bytes", "peak_reserved_bytes"):
        peaks = [(rank[name], rank["left_over_bytes"]) for rank in memory["by_rank"]]
        memory[name] = None if peaks[0][0] is None else max(peak - left for peak, left in peaks)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--deadline_s", type=float, default=float("inf"))
    parser.add_argument("--first", type=int, default=0, help="skip the runs before this one")
    parser.add_argument("--git_commit", help="of this tree, where it has no .git")
    arguments = parser.parse_args(argv)
    plan = json.loads(arguments.plan.read_text())
    runs = {
        f"{index} {run}": {**plan["common"], **run}
        for index, run in enumerate(plan["runs"])
        if index >= arguments.first
    }
    records: list[Any] = []
    if arguments.first and arguments.out.exists():  # goes on where an earlier start ended
        records = json.loads(arguments.out.read_text())["records"]
    share_between_runs()
    began = time.monotonic()
    with open_group() as group:
        spans = Spans(group.device)
        spans.watch()
        use = functools.partial(measure, spans=spans)
        before = left_over()
        for finished in each_run(group, runs, use, deadline_s=arguments.deadline_s):
            after = left_over()
            if group.process.rank == 0:
                print(f"[{time.monotonic() - began:5.0f} s] {finished.name}", flush=True)
                if finished.refused is not None:
                    print(f"refused: {finished.refused}", flush=True)
                else:
                    record = build_record(finished.results, group.folder, before, after)
                    record["git_commit"] = record["git_commit"] or arguments.git_commit
                    records.append(record)
                    print(table([Record.model_validate(record)], COLUMNS).splitlines()[-1])
                write_json(arguments.out, {"records": records})
            before = after
        if group.process.rank == 0:
            print(table([Record.model_validate(record) for record in records], COLUMNS), flush=True)
    return 0
