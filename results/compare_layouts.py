"""Many layouts in one process group, one after the other: speed, memory, bubble.

    torchrun --nproc_per_node=4 results/compare_layouts.py PLAN.json OUT.json [--deadline_s 500]
    python results/run_plan.py --unpack OUT.json results/records/h200-x4-layouts

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
import contextlib
import copy
import functools
import gc
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pipeline_bubble import REDUCTION, Spans, bubble, traced  # noqa: E402

from distributed_training import assemble, launch  # noqa: E402
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
from distributed_training.plan import load_plan_data, make_plan  # noqa: E402
from distributed_training.record import start_record, timestamp, write_json  # noqa: E402
from distributed_training.strategy import load_strategy  # noqa: E402
from distributed_training.tables import table  # noqa: E402
from distributed_training.topology import Topology, build_topology, process_group  # noqa: E402

NUM_STEPS, NUM_WARMUP = 12, 4  # summarise_performance leaves out as many of so many
PATIENCE = timedelta(minutes=3)  # for the others, where all ranks meet
COLUMNS = (
    "strategy", "batch", "tokens/s", "ms a step", "MFU", "peak GPU memory", "bubble",
    "ideal bubble", "status",
)  # fmt: skip


def run_one(
    values: dict[str, Any], machine: Any, process: launch.Process, spans: Spans, folder: Path
) -> Any:
    """Train a few steps under one layout; its record on rank 0, None elsewhere. Collective."""
    config = build_config({"output_dir": str(folder), **values})
    topology = build_topology(
        load_strategy(config),
        world_size=process.world_size,
        rank=process.rank,
        local_rank=process.local_rank,
        device_type=spans.device.type,
    )
    plan = agree_on_plan(config, machine, process)
    data, _ = load_plan_data(plan)
    sampler = build_sampler(plan.config, data, topology)
    engine = build_engine(plan, topology)
    durations, mine = train(engine, sampler, data.train, topology, spans)
    ranks: list[Any] = [None] * topology.world_size
    dist.all_gather_object(ranks, mine)
    start = describe_run(plan, topology, sampler, NUM_STEPS, data, None)
    start["dtypes"] = engine.describe_dtypes()
    engine.close()
    if topology.rank != 0:
        return None
    record = start_record(folder, **start)
    record.update(
        status="ok",
        finished_at=timestamp(),
        step=NUM_STEPS,
        run_dir="",
        performance=summarise(plan, topology, sampler, durations),
        memory={"peak_host_bytes": None, "by_rank": ranks},  # see leave_out_left_over
        bubble=bubble(ranks) if topology.pp > 1 and ranks[0]["phase_s"] else None,
    )
    return record.values


def train(
    engine: Any, sampler: Any, samples: Any, topology: Topology, spans: Spans
) -> tuple[list[float], dict[str, Any]]:
    """Seconds of each step, and what else was measured on this rank."""
    timer, memory = StepTimer(topology.device), PeakMemory(topology.device)
    memory.begin()
    timer.restart()
    for step in range(NUM_STEPS):
        if step == NUM_WARMUP:
            spans.marks.clear()
        engine.train_step(sampler.step_batch(samples, step))
        timer.mark()
    memory.end()
    timed = NUM_STEPS - NUM_WARMUP
    phases, reductions, computing = (
        spans.seconds(kind, timed) for kind in ("Pipeline", REDUCTION, "PipelineStage")
    )
    return timer.durations_s(), {
        "rank": topology.rank,
        **memory.as_dict(),
        "peak_host_bytes": None,  # the process's, with all runs before
        "phase_s": median(a - b for a, b in zip(phases, reductions, strict=True)),
        "computing_s": median(computing),
        "kernels_s": traced(engine, sampler.step_batch(samples, NUM_STEPS), topology),
    }


def agree_on_plan(config: Any, machine: Any, process: launch.Process) -> Any:
    """This rank's plan; the same UserError on all ranks where one of them is refused."""
    plan, refused = None, None
    try:
        plan = make_plan(
            config,
            machine,
            num_processes=process.world_size,
            processes_here=process.local_world_size,
        )
    except UserError as error:
        refused = str(error)
    answers: list[Any] = [None] * process.world_size
    dist.all_gather_object(answers, refused)
    for answer in answers:
        if answer is not None:
            raise UserError(answer)
    return plan


def summarise(plan: Any, topology: Topology, sampler: Any, durations: list[float]) -> Any:
    """As for a training. The last step of an epoch takes as long with fewer samples."""
    return summarise_performance(
        durations,
        tokens_per_step=sampler.global_batch_size * plan.config.seq_len,
        flops_per_token=plan.size.flops_per_token(plan.config.seq_len),
        world_size=topology.world_size,
        device_name=plan.machine.gpu_name,
    )


def keep_what_all_runs_share() -> None:
    """Communicators, which live as long as the process, and weights, which take long to draw."""
    for name in ("build_mesh", "new_pipeline_group"):
        setattr(Topology, name, functools.cache(getattr(Topology, name)))
    drawn = functools.lru_cache(maxsize=1)(assemble.build_model)
    assemble.build_model = lambda size, **words: copy.deepcopy(drawn(size, **words))


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
    keep_what_all_runs_share()
    began = time.monotonic()
    records: list[Any] = []
    if arguments.first and arguments.out.exists():  # goes on where an earlier start ended
        records = json.loads(arguments.out.read_text())["records"]
    with process_group(place, timeout=PATIENCE), shared_folder(process) as folder:
        spans = Spans(place.device)
        spans.watch()
        for index, run in enumerate(plan["runs"][arguments.first :], arguments.first):
            late = torch.tensor(float(time.monotonic() - began > arguments.deadline_s))
            dist.broadcast(late, 0)  # all ranks stop at the same run
            if late:
                break
            before = left_over(process)
            record = attempt({**plan["common"], **run}, machine, process, spans, folder)
            torch.compiler.reset()  # else graphs of other batch sizes become dynamic ones
            gc.collect()
            if machine.num_gpus:
                torch.cuda.empty_cache()
            after = left_over(process)
            if process.rank == 0:
                print(f"[{time.monotonic() - began:5.0f} s] {index} {run}", flush=True)
                if record is not None:
                    leave_out_left_over(record["memory"], before, after)
                    record["git_commit"] = record["git_commit"] or arguments.git_commit
                    records.append(record)
                    print(table([record], COLUMNS).splitlines()[-1], flush=True)
                write_json(arguments.out, {"records": records})
    if process.rank == 0:
        print(table(records, COLUMNS))


def left_over(process: launch.Process) -> list[int]:
    """Bytes that each rank's allocator cannot give back between two runs."""
    by_rank: list[Any] = [None] * process.world_size
    mine = torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
    dist.all_gather_object(by_rank, mine)
    return by_rank


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


@contextlib.contextmanager
def shared_folder(process: launch.Process) -> Iterator[Path]:
    """One for all ranks and runs, so that the text is tokenised once."""
    folder = [tempfile.mkdtemp() if process.rank == 0 else None]
    dist.broadcast_object_list(folder, device=torch.device("cpu"))
    try:
        yield Path(str(folder[0]))
    finally:
        if process.rank == 0:
            shutil.rmtree(str(folder[0]), ignore_errors=True)


def attempt(
    values: dict[str, Any], machine: Any, process: launch.Process, spans: Spans, folder: Path
) -> Any:
    """The record, or None with the reason printed where this layout is refused (on all ranks)."""
    spans.marks.clear()
    try:
        return run_one(values, machine, process, spans, folder)
    except UserError as error:
        if process.rank == 0:
            print(f"refused: {error}")
        return None
    except BaseException:
        # Other ranks wait in a collective, and NCCL would wait for them before it lets us go.
        traceback.print_exc()
        sys.stderr.flush()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


if __name__ == "__main__":
    main()
