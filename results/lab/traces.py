"""What communication takes of a step under every run of a plan, in one process group.

    torchrun --nproc_per_node=4 results/lab/traces.py PLAN.json FOLDER

After a warm-up a few steps are timed, and two more are traced on every rank and read as
overlap.py reads the traces of a run. FOLDER/overlap.json holds all runs: every rank's seconds, and
what rank 0 does when in the first of the two steps. A run that fails ends the processes, and the
file says so; the same command then goes on with the runs that are not in the file.
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
from distributed_training.parallel.agree import from_rank_0, gather
from distributed_training.parallel.mesh import Topology
from distributed_training.records.metrics import StepTimer
from distributed_training.records.record import provenance, write_json
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import load_json
from distributed_training.tools import harness
from distributed_training.train.profiling import SILENT
from results.lab.overlap import STEP, Rank, Spans, clip, read_trace, union
from results.lab.runs import read_plan

NUM_WARMUP = NUM_EAGER_STEPS + 2  # the first replay of a graph included
NUM_TIMED = 8
NUM_TRACED = 2
FINEST = 3000  # of a step: spans that are closer than a third of a pixel are kept as one
FAILED = "it ended the processes; what they printed says why"


def trace(run: harness.Run) -> dict[str, Any]:
    """Train a few steps: this rank's times; on rank 0 also when it did what. Collective."""
    topology = run.topology
    train = _trainer(run)
    timer = StepTimer(topology.device)
    for _ in range(NUM_WARMUP):
        train()
    timer.restart()
    for _ in range(NUM_TIMED):
        train()
        timer.mark()
    timed_s = float(np.median(timer.durations_s()))
    rank = _traced(train, topology)
    found = {
        "rank": topology.rank,
        "timed_s": timed_s,
        "traced_s": rank.seconds(),
        "operations": {kind: count / rank.steps for kind, count in rank.counts.items()},
    }
    if topology.rank == 0:
        config = run.plan.config
        names = ("precision", "compile", "cuda_graphs")
        how = {name: getattr(config, name) for name in names}
        found["how"] = {**how, "mesh": run.plan.mesh, "batch": run.plan.batch.model_dump()}
        found["timeline"] = timeline(rank)
    return found


def _trainer(run: harness.Run) -> Any:
    step = iter(range(10**9))
    return lambda: run.engine.train_step(run.batch(next(step)))


def _traced(train: Any, topology: Topology) -> Rank:
    def wait() -> None:
        if topology.device_type == "cuda":
            torch.cuda.synchronize(topology.device)

    os.environ.setdefault("KINETO_LOG_LEVEL", SILENT)
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
            gather(None)  # else the first step of some would wait for the profiler of others
            profiler.step()
            for left in reversed(range(NUM_TRACED)):
                train()
                if not left:
                    wait()
                profiler.step()
        document = json.loads(Path(file.name).read_text())
    return read_trace(without_first_step(document), topology.rank)


def without_first_step(trace: dict[str, Any]) -> dict[str, Any]:
    """A trace without what began before its second step."""
    steps = [
        event["ts"]
        for event in trace["traceEvents"]
        if event["name"].startswith(STEP) and event.get("cat") == "user_annotation"
    ]
    second = sorted(steps)[1]
    events = [event for event in trace["traceEvents"] if event.get("ts", second) >= second]
    return {**trace, "traceEvents": events}


def timeline(rank: Rank) -> dict[str, Any]:
    """What the rank did when in the first of its steps, which are taken to be equally long: lists
    of [begin, end] in microseconds since it began."""
    begin, end = rank.window
    long = (end - begin) / rank.steps

    def whole(spans: Spans) -> list[list[int]]:
        spans = union(clip(spans, (begin, begin + long)), long / FINEST)
        return [[round(first - begin), round(last - begin)] for first, last in spans]

    lanes = {"computing": rank.computing, "exposed": rank.exposed}
    return {
        "step_us": round(long),
        **{name: whole(spans) for name, spans in lanes.items()},
        "by_kind": {kind: whole(spans) for kind, spans in rank.by_kind.items()},
    }


def summarize(runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """A row a run that did not fail: milliseconds a step without the profiler; of the traced steps,
    the mean over the ranks of their shares, and the lowest and highest exposed one; operations of
    the rank that has most."""
    rows = {}
    for name, found in runs.items():
        if "failed" in found:
            continue
        ranks = found["ranks"]
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


def result_of(found: list[dict[str, Any]] | str) -> dict[str, Any]:
    """A run's entry, from what its ranks found or why it was refused."""
    if isinstance(found, str):
        return {"failed": found}
    return {"how": found[0].pop("how"), "timeline": found[0].pop("timeline"), "ranks": found}


def build_record(plan: Any, group: harness.Group, runs: dict[str, Any], commit: str | None) -> Any:
    """All that is known so far."""
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
        "failed": {name: found["failed"] for name, found in runs.items() if "failed" in found},
        "runs": runs,
    }


def runs_so_far(file: Path, plan: Any) -> dict[str, Any]:
    """What the file holds. Raises UserError where that is of another plan."""
    before = load_json(file, "record") if file.exists() else {"plan": plan, "runs": {}}
    if before["plan"] != plan:
        raise UserError(f"{file} is of another plan", fix="delete it, or name another folder")
    return dict(before["runs"])


def main(argv: Sequence[str] | None = None) -> int:
    arguments, plan, runs = read_plan("Exposed communication of every run of a plan.", argv)
    file = arguments.out / "overlap.json"
    began = time.monotonic()
    done = runs_so_far(file, plan)  # before the processes meet: rank 0 has not written since
    with harness.open_group_for(runs) as group:
        first = group.process.rank == 0
        kept = harness.Kept()
        say = functools.partial(print, flush=True) if first else lambda text: None

        def keep(name: str, found: dict[str, Any]) -> None:
            done[name] = found
            if first:
                write_json(file, build_record(plan, group, done, arguments.git_commit))

        for name, values in runs.items():
            if name in done:
                say(f"in {file} already: {name}")
                continue
            if from_rank_0(time.monotonic() - began > arguments.deadline_s):
                say(f"not started: {name}")
                continue
            keep(name, {"failed": FAILED})
            for _, found in harness.each_run(group, {name: values}, trace, kept=kept):
                keep(name, result_of(found))
            row = summarize(done).get(name)
            told = done[name]["failed"] if row is None else _told(row)
            say(f"[{time.monotonic() - began:5.0f} s] {name}: {told}")
        say(f"{len(summarize(done))} of {len(runs)} runs in {file}")
    return 0


def _told(row: dict[str, float]) -> str:
    return ", ".join(f"{value:.1f} {name}" for name, value in row.items())


if __name__ == "__main__":
    checkout.run(main)
