"""Measure the communication in every run of a plan, in one process group.

    torchrun --nproc_per_node=4 results/lab/traces.py PLAN.json FOLDER

After a warm-up, the program times a few steps, traces two more steps on every rank, and analyzes
the traces like overlap.py. For each run, FOLDER/overlap.json contains the times of every rank, and
a timeline of rank 0 in the first traced step. If a run terminates the processes, the file marks the
run as failed. Run the same command again to continue with the runs that are not in the file.
"""

import functools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import checkout
import numpy as np
import torch
from torch.profiler import ProfilerActivity

from distributed_training.engines.graphs import NUM_EAGER_STEPS
from distributed_training.parallel.agree import broadcast_from_rank_0, gather
from distributed_training.parallel.mesh import Topology
from distributed_training.records.metrics import StepTimer
from distributed_training.records.record import provenance, write_json
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import load_json
from results.lab import harness
from results.lab.overlap import STEP, RankTrace, Spans, clip, read_trace, union
from results.lab.runs import read_plan

NUM_WARMUP = NUM_EAGER_STEPS + 2  # includes the first replay of a graph
NUM_TIMED = 8
NUM_TRACED = 2
TIMELINE_RESOLUTION = 3000  # Gaps of at most 1/3000 of a step, a third of a pixel, are closed.
FAILED = "The run ended the processes, which printed the reason."


def trace(run: harness.Run) -> dict[str, Any]:
    """Train for a few steps. Return this rank's times and, on rank 0, also its timeline. All ranks
    must call this function."""
    topology = run.topology
    train = _step_function(run)
    timer = StepTimer(topology.device)
    for _ in range(NUM_WARMUP):
        train()
    timer.restart()
    for _ in range(NUM_TIMED):
        train()
        timer.mark()
    timed_s = float(np.median(timer.durations_s()))
    rank = _trace_steps(train, topology)
    measured = {
        "rank": topology.rank,
        "timed_s": timed_s,
        "traced_s": rank.seconds(),
        "operations": {kind: count / rank.steps for kind, count in rank.counts.items()},
    }
    if topology.rank == 0:
        config = run.plan.config
        names = ("precision", "compile", "cuda_graphs")
        settings = {name: getattr(config, name) for name in names}
        measured["how"] = {**settings, "mesh": run.plan.mesh, "batch": run.plan.batch.model_dump()}
        measured["timeline"] = timeline(rank)
    return measured


def _step_function(run: harness.Run) -> Any:
    step = iter(range(10**9))
    return lambda: run.engine.train_step(run.batch(next(step)))


def _trace_steps(train: Any, topology: Topology) -> RankTrace:
    def wait() -> None:
        if topology.device_type == "cuda":
            torch.cuda.synchronize(topology.device)

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # Kineto then prints nothing
    activities = [ProfilerActivity.CPU]
    if topology.device_type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        with torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=1 + NUM_TRACED, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(file.name),
        ) as profiler:
            train()
            wait()
            profiler.step()
            gather(
                None
            )  # Otherwise, the first step of a rank would wait for another rank's profiler.
            profiler.step()
            for num_remaining in reversed(range(NUM_TRACED)):
                train()
                if not num_remaining:
                    wait()
                profiler.step()
        document = json.loads(Path(file.name).read_text())
    return read_trace(without_first_step(document), topology.rank)


def without_first_step(trace: dict[str, Any]) -> dict[str, Any]:
    """Return the trace without the events that began before the second step."""
    steps = [
        event["ts"]
        for event in trace["traceEvents"]
        if event["name"].startswith(STEP) and event.get("cat") == "user_annotation"
    ]
    second = sorted(steps)[1]
    events = [event for event in trace["traceEvents"] if event.get("ts", second) >= second]
    return {**trace, "traceEvents": events}


def timeline(rank: RankTrace) -> dict[str, Any]:
    """Return a rank's activity in its first step, as lists of [begin, end] in microseconds since
    the step began. All steps are assumed to be equally long."""
    begin, end = rank.window
    step_us = (end - begin) / rank.steps

    def in_first_step(spans: Spans) -> list[list[int]]:
        spans = union(clip(spans, (begin, begin + step_us)), step_us / TIMELINE_RESOLUTION)
        return [[round(first - begin), round(last - begin)] for first, last in spans]

    lanes = {"computing": rank.computing, "exposed": rank.exposed}
    return {
        "step_us": round(step_us),
        **{name: in_first_step(spans) for name, spans in lanes.items()},
        "by_kind": {kind: in_first_step(spans) for kind, spans in rank.by_kind.items()},
    }


def summarize(runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return one row per run that did not fail. A row contains the milliseconds per step of the
    slowest rank without the profiler, and the operations per step of the rank with the most
    operations. It also contains each activity's share of the traced steps, averaged over the ranks,
    and the lowest and highest share of exposed communication on any rank."""
    rows = {}
    for name, result in runs.items():
        if "failed" in result:
            continue
        ranks = result["ranks"]
        shares = {
            part: [100 * rank["traced_s"][part] / rank["traced_s"]["step"] for rank in ranks]
            for part in ("computing", "communicating", "exposed", "neither")
        }
        rows[name] = {
            "ms per step": 1000 * max(rank["timed_s"] for rank in ranks),
            "operations": max(sum(rank["operations"].values()) for rank in ranks),
            **{f"% {part}": statistics.mean(values) for part, values in shares.items()},
            "from": min(shares["exposed"]),
            "to": max(shares["exposed"]),
        }
    return rows


def build_result(ranks: list[dict[str, Any]] | str) -> dict[str, Any]:
    """Build a run's entry from the measurements of its ranks or from the reason why it failed."""
    if isinstance(ranks, str):
        return {"failed": ranks}
    return {"how": ranks[0].pop("how"), "timeline": ranks[0].pop("timeline"), "ranks": ranks}


def build_record(plan: Any, group: harness.Group, runs: dict[str, Any], commit: str | None) -> Any:
    """Build the document with all runs so far."""
    on_gpu = group.device.type == "cuda"
    return {
        "what": plan["what"],
        **provenance(plan["command"], commit=commit),
        "device": torch.cuda.get_device_name(group.device) if on_gpu else "CPU",
        "cuda": torch.version.cuda if on_gpu else None,
        "processes": group.process.world_size,
        "load_average": os.getloadavg()[0],
        "steps": {"warm_up": NUM_WARMUP, "timed": NUM_TIMED, "traced": NUM_TRACED},
        "plan": plan,
        "shares": summarize(runs),
        "failed": {name: run["failed"] for name, run in runs.items() if "failed" in run},
        "runs": runs,
    }


def runs_so_far(file: Path, plan: Any) -> dict[str, Any]:
    """Return the runs in the file. Raises UserError if the file belongs to another plan."""
    record = load_json(file, "record") if file.exists() else {"plan": plan, "runs": {}}
    if record["plan"] != plan:
        raise UserError(f"{file} belongs to another plan", fix="delete it, or name another folder")
    return dict(record["runs"])


def main(argv: Sequence[str] | None = None) -> int:
    arguments, plan, runs = read_plan(
        "Measure the exposed communication of every run of a plan.", argv
    )
    file = arguments.out / "overlap.json"
    began = time.monotonic()
    # Read the file before the process group opens, because rank 0 writes the file later.
    results = runs_so_far(file, plan)
    with harness.open_group_for(runs) as group:
        is_rank_0 = group.process.rank == 0
        run_cache = harness.RunCache()
        log = functools.partial(print, flush=True) if is_rank_0 else lambda text: None

        def save_result(name: str, result: dict[str, Any]) -> None:
            results[name] = result
            if is_rank_0:
                write_json(file, build_record(plan, group, results, arguments.git_commit))

        for name, values in runs.items():
            if name in results:
                log(f"{file} already has: {name}")
                continue
            if broadcast_from_rank_0(time.monotonic() - began > arguments.deadline_s):
                log(f"not started: {name}")
                continue
            save_result(name, {"failed": FAILED})
            for _, ranks in harness.each_run(group, {name: values}, trace, run_cache=run_cache):
                save_result(name, build_result(ranks))
            row = summarize(results).get(name)
            text = results[name]["failed"] if row is None else _row_text(row)
            log(f"[{time.monotonic() - began:5.0f} s] {name}: {text}")
        log(f"{len(summarize(results))} of {len(runs)} runs in {file}")
    return 0


def _row_text(row: dict[str, float]) -> str:
    return ", ".join(f"{value:.1f} {name}" for name, value in row.items())


if __name__ == "__main__":
    checkout.run(main)
