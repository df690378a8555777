"""Many layouts in one process group, one after the other: speed, memory, bubble.

    torchrun --nproc_per_node=4 results/compare_layouts.py PLAN.json OUT.json [--deadline_s 500]
    python results/run_plan.py --unpack OUT.json results/records/h200-x4-layouts

A plan is JSON: {"common": {CONFIG keys}, "runs": [{CONFIG keys}, ...]}. Starting processes takes
longer than the steps that are timed, so all runs share them; engines, data and clipping are those
of real_model_example.py. Each run leaves a record as a training does, with what it measured of the
pipeline in "bubble": a rank's idle share is what is left of the step's forward and backward phase
when the time in which it computes is taken out. Exchanges of gradients and the optimizer follow
that phase and are in the step time only.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining.stage import PipelineStage

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from distributed_training import launch  # noqa: E402
from distributed_training.assemble import build_engine, build_sampler  # noqa: E402
from distributed_training.config import build_config  # noqa: E402
from distributed_training.errors import UserError  # noqa: E402
from distributed_training.machine import detect_machine  # noqa: E402
from distributed_training.metrics import (  # noqa: E402
    PeakMemory,
    StepTimer,
    summarise_performance,
)
from distributed_training.outcome import describe_run  # noqa: E402
from distributed_training.parallel.pipeline import Pipeline  # noqa: E402
from distributed_training.plan import load_plan_data, make_plan  # noqa: E402
from distributed_training.record import start_record, timestamp, write_json  # noqa: E402
from distributed_training.strategy import load_strategy  # noqa: E402
from distributed_training.tables import table  # noqa: E402
from distributed_training.topology import Topology, build_topology, process_group  # noqa: E402

NUM_STEPS, NUM_WARMUP = 13, 4  # summarise_performance leaves out as many of so many
COLUMNS = (
    "strategy", "batch", "tokens/s", "ms a step", "MFU", "peak GPU memory", "bubble",
    "ideal bubble", "status",
)  # fmt: skip
PHASES = {
    Pipeline: ["forward_backward"],
    PipelineStage: ["forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"],
}
REDUCTION = "perform_reduce_grad"  # torch reduces over dp at the end of the phase


class Spans:
    """Begin and end of calls, on the GPU's clock where there is one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: dict[str, list[tuple[Any, Any]]] = {}

    def watch(self) -> None:
        """Mark every call of PHASES from now on, for the rest of the process."""
        for owner, names in PHASES.items():
            for name in names:
                setattr(owner, name, self._watched(owner.__name__, getattr(owner, name)))
        reduce = getattr(PipelineStage, REDUCTION)
        setattr(PipelineStage, REDUCTION, self._watched(REDUCTION, reduce))

    def _watched(self, kind: str, function: Any) -> Any:
        def call(*arguments: Any, **words: Any) -> Any:
            begin = self._now()
            result = function(*arguments, **words)
            self.marks.setdefault(kind, []).append((begin, self._now()))
            return result

        return call

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, kind: str) -> float:
        """Sum of the durations of all calls since `marks` was emptied."""
        if self.device.type != "cuda":
            return sum(end - begin for begin, end in self.marks.get(kind, []))
        torch.cuda.synchronize(self.device)
        return sum(begin.elapsed_time(end) / 1000 for begin, end in self.marks.get(kind, []))


def run_one(values: dict[str, Any], machine: Any, process: launch.Process, spans: Spans) -> Any:
    """Train a few steps under one layout; its record on rank 0, None elsewhere. Collective."""
    with tempfile.TemporaryDirectory() as folder:
        config = build_config({"output_dir": folder, **values})
        topology = build_topology(
            load_strategy(config),
            world_size=process.world_size,
            rank=process.rank,
            local_rank=process.local_rank,
            device_type=spans.device.type,
        )
        plan = make_plan(
            config, machine, num_processes=process.world_size,
            processes_here=process.local_world_size,
        )  # fmt: skip
        data, _ = load_plan_data(plan)
        sampler = build_sampler(plan.config, data, topology)
        engine = build_engine(plan, topology)
        timer, memory = StepTimer(topology.device), PeakMemory(topology.device)
        memory.begin()
        timer.restart()
        for step in range(NUM_STEPS):
            if step == NUM_WARMUP:
                spans.marks.clear()
            engine.train_step(sampler.step_batch(data.train, step))
            timer.mark()
        memory.end()
        durations = timer.durations_s()
        mine = {
            "rank": topology.rank,
            **memory.as_dict(),
            "phase_s": spans.seconds("Pipeline") - spans.seconds(REDUCTION),
            "computing_s": spans.seconds("PipelineStage"),
        }
        ranks: list[Any] = [None] * topology.world_size
        dist.all_gather_object(ranks, mine)
        start = describe_run(plan, topology, sampler, NUM_STEPS, data, None)
        start["dtypes"] = engine.describe_dtypes()
        engine.close()
        if topology.rank != 0:
            return None
        record = start_record(Path(folder), **start)
        record.update(
            status="ok",
            finished_at=timestamp(),
            step=NUM_STEPS,
            run_dir="",
            performance=summarise(plan, topology, sampler, durations),
            memory={
                **{
                    name: None if ranks[0][name] is None else max(rank[name] for rank in ranks)
                    for name in ("peak_allocated_bytes", "peak_reserved_bytes", "peak_host_bytes")
                },
                "by_rank": ranks,
            },
            bubble=bubble(ranks) if topology.pp > 1 and ranks[0]["phase_s"] else None,
        )
        return record.values


def summarise(plan: Any, topology: Topology, sampler: Any, durations: list[float]) -> Any:
    """As for a training. The last step of an epoch takes as long with fewer samples."""
    return summarise_performance(
        durations,
        tokens_per_step=sampler.global_batch_size * plan.config.seq_len,
        flops_per_token=plan.size.flops_per_token(plan.config.seq_len),
        world_size=topology.world_size,
        device_name=plan.machine.gpu_name,
    )


def bubble(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Idle shares of the forward and backward phase, taken as long as it is on the slowest rank."""
    phase = max(rank["phase_s"] for rank in ranks)
    shares = [1 - rank["computing_s"] / phase for rank in ranks]
    return {"phase_s": phase, "idle_share": sum(shares) / len(shares), "by_rank": shares}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--deadline_s", type=float, default=float("inf"))
    parser.add_argument("--first", type=int, default=0, help="skip the runs before this one")
    parser.add_argument("--git_commit", help="of this tree, where it has no .git")
    arguments = parser.parse_args()
    plan = json.loads(arguments.plan.read_text())
    machine = detect_machine()
    process = launch.current_process(os.environ) or launch.alone()
    launch.prepare_environment(machine, process.local_world_size)
    axes = {"pp": 1, "dp_replicate": process.world_size, "dp_shard": 1, "tp": 1}
    place = Topology(
        world_size=process.world_size, rank=process.rank, local_rank=process.local_rank,
        device_type="cuda" if machine.num_gpus else "cpu", **axes,
    )  # fmt: skip
    # Every mesh brings communicators that live as long as the process, with memory of their own.
    Topology.build_mesh = functools.cache(Topology.build_mesh)  # type: ignore[method-assign]
    began = time.monotonic()
    records: list[Any] = []
    with process_group(place):
        spans = Spans(place.device)
        spans.watch()
        for index, run in enumerate(plan["runs"][arguments.first :], arguments.first):
            late = torch.tensor(float(time.monotonic() - began > arguments.deadline_s))
            dist.broadcast(late, 0)  # all ranks stop at the same run
            if late:
                break
            record = attempt({**plan["common"], **run}, machine, process, spans)
            gc.collect()
            torch.compiler.reset()  # else graphs of other batch sizes become dynamic ones
            if machine.num_gpus:
                torch.cuda.empty_cache()
            if process.rank == 0:
                print(f"[{time.monotonic() - began:5.0f} s] {index} {run}", flush=True)
                if record is not None:
                    record["git_commit"] = record["git_commit"] or arguments.git_commit
                    records.append(record)
                    print(table([record], COLUMNS).splitlines()[-1], flush=True)
                write_json(arguments.out, {"records": records})
    if process.rank == 0:
        print(table(records, COLUMNS))


def attempt(values: dict[str, Any], machine: Any, process: launch.Process, spans: Spans) -> Any:
    """The record, or None with the reason printed where this layout is refused (on all ranks)."""
    spans.marks.clear()
    try:
        return run_one(values, machine, process, spans)
    except UserError as error:
        if process.rank == 0:
            print(f"refused: {error}")
    except torch.cuda.OutOfMemoryError:
        traceback.print_exc()
        raise  # other ranks wait in a collective: nothing can follow
    return None


if __name__ == "__main__":
    main()
