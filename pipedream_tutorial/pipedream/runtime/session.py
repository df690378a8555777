"""All runs of one start of the runtime, in one process of several: set up once, run every case."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from pipedream.errors import UserError
from pipedream.plan.profile import device_name
from pipedream.runtime.channels import connect, connection_to, meet_neighbours
from pipedream.runtime.clocks import build_clock
from pipedream.runtime.launch import Process, meet
from pipedream.runtime.prediction import MeasuredRun, makespan_ns
from pipedream.runtime.stage import Station, pace_from_ms, run_stage, warm_up_compute
from pipedream.runtime.workload import (
    Workload,
    build_workload,
    count,
    describe_workload,
    equal_bits,
    on_cpu,
    train_alone,
)
from pipedream.schedules.catalogue import schedule_for_training
from pipedream.schedules.ops import Schedule
from pipedream.schedules.policies import Policy
from pipedream.train.trainer import Weights

Config = Mapping[str, Any]
Summary = dict[str, Any]
"""What rank 0 needs to know of one repeat on one stage: plain data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One schedule at one number of microbatches."""

    name: str
    num_microbatches: int
    schedule: Schedule
    policy: Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What rank 0 knows after all runs."""

    runs: list[MeasuredRun]
    weights: list[list[Weights]]
    """By run, then by stage; empty unless they were asked for."""


def build_cases(config: Config) -> list[Case]:
    """Every schedule at every number of microbatches; UserError for what cannot be trained."""
    return [
        Case(name=name, num_microbatches=m, schedule=schedule, policy=policy)
        for name in config["schedule"]
        for m in config["num_microbatches"]
        for schedule, policy in [
            schedule_for_training(name, config["num_stages"], m, config["num_batches"])
        ]
    ]


def on_gpus(config: Config) -> bool:
    """Whether the stages run on GPUs: where device=auto finds one for each of them, they do.

    Raises UserError where device=cuda finds fewer.
    """
    wanted, stages, gpus = config["device"], config["num_stages"], torch.cuda.device_count()
    if wanted == "cuda" and gpus < stages:
        fewer = "set num_stages to that, " if gpus else ""
        raise UserError(
            f"device=cuda needs a GPU for each of {stages} stages, and this machine has "
            f"{gpus or 'none'}",
            f"{fewer}run it where there are {stages}, or add --set device=cpu",
        )
    return wanted != "cpu" and gpus >= stages


def emulated_ms(config: Config, device: torch.device) -> tuple[float, float]:
    """Forward and backward durations that are slept: on a CPU as CONFIG says, on a GPU none."""
    if device.type == "cuda":
        return 0.0, 0.0
    return float(config["forward_ms"]), float(config["backward_ms"])


def run_session(
    config: Config,
    process: Process,
    *,
    keep_weights: bool,
    say: Callable[[str], None],
    keep: Callable[[list[MeasuredRun]], None],
) -> Outcome | None:
    """Run all cases; what came of them on rank 0, None on the others.

    On rank 0 `say` prints, and `keep` gets the runs so far, after each.
    """
    cases = build_cases(config)
    device = _take_device(config, process)
    workload = build_workload(config, device)
    timeout = datetime.timedelta(seconds=float(config["timeout_s"]))
    meet(process, timeout)
    station = _build_station(config, process, device, workload, timeout)
    if process.rank == 0:
        say(_describe(config, device, workload))
    del workload
    warm_up_compute(station)
    runs: list[MeasuredRun] = []
    weights: list[list[Weights]] = []
    wanted = keep_weights or config["check_weights"]
    for case in cases:
        gathered = _gather(_run_case(config, station, case, with_weights=wanted), process)
        if gathered is None:
            continue
        summaries, stage_weights = zip(*gathered, strict=True)
        runs.append(_measured_run(config, case, summaries))
        weights.append(list(stage_weights))
        seconds = makespan_ns(runs[-1].events) / 1e9
        say(f"  {case.name}, m={case.num_microbatches}: {seconds:.3f} s")
        keep(runs)
    with connection_to("the other stages"):
        dist.barrier()
    dist.destroy_process_group()
    if process.rank != 0:
        return None
    if config["check_weights"]:  # only now: the others would wait for it, and not for ever
        say("  training in one process, to compare the weights")
        runs = [
            replace(run, weights_equal=equal_bits(ours, _alone(config, case, device)))
            for case, run, ours in zip(cases, runs, weights, strict=True)
        ]
        keep(runs)
    return Outcome(runs=runs, weights=weights if keep_weights else [])


def _take_device(config: Config, process: Process) -> torch.device:
    """This stage's device, set up for what follows."""
    torch.set_num_threads(1)  # a stage stands for one device, and so does the one-process run
    if not on_gpus(config):
        return torch.device("cpu")
    device = torch.device("cuda", process.local_rank)
    torch.cuda.set_device(device)
    if config["check_weights"]:  # sums in any order give other bits
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it
        torch.use_deterministic_algorithms(True, warn_only=True)
    return device


def _build_station(
    config: Config,
    process: Process,
    device: torch.device,
    workload: Workload,
    timeout: datetime.timedelta,
) -> Station:
    """Connect this stage to its neighbours; of the workload's stages it keeps only its own."""
    stage, p = process.rank, process.world_size
    backend = "nccl" if device.type == "cuda" else "gloo"
    groups = connect(
        stage, p, backend=backend, device=device, timeout=timeout, max_ctas=config["nccl_max_ctas"]
    )
    module = workload.modules[stage]
    example, _ = workload.task.microbatch(0)
    neighbours = meet_neighbours(stage, p, groups, module, example)
    return Station(
        stage=stage,
        num_stages=p,
        module=module.cpu(),
        loss=workload.loss if stage == p - 1 else None,
        task=workload.task,
        neighbours=neighbours,
        clock=build_clock(device),
        receive_depth=config["receive_depth"],
        learning_rate=config["learning_rate"],
        device=device,
    )


def _run_case(
    config: Config, station: Station, case: Case, *, with_weights: bool
) -> tuple[list[Summary], Weights]:
    """Of each repeat what rank 0 needs to know, and the last one's weights if they are wanted.

    Warm-up runs come first; nothing is slept in them.
    """
    sizes = {"num_microbatches": case.num_microbatches, "num_batches": config["num_batches"]}
    for _ in range(config["warmups"]):
        run_stage(station, case.schedule, case.policy, pace=pace_from_ms(0, 0), **sizes)
    pace = pace_from_ms(*emulated_ms(config, station.device))
    summaries, weights = [], {}
    for repeat in range(config["repeats"]):
        run = run_stage(station, case.schedule, case.policy, pace=pace, **sizes)
        summaries.append(
            {
                "events": run.events,
                "peak_versions": run.trainer.peak_versions,
                "peak_memory_bytes": run.peak_memory_bytes,
                "waited_for_host": run.waited_for_host,
                "losses": {i: float(loss) for i, loss in run.trainer.losses.items()},
            }
        )
        if with_weights and repeat == config["repeats"] - 1:
            weights = on_cpu(run.trainer.weights)
        del run  # or its memory would count in the next one's peak
    return summaries, weights


def _measured_run(config: Config, case: Case, summaries: tuple[list[Summary], ...]) -> MeasuredRun:
    """Of the repeats the one with the median makespan (of an even number, the faster middle)."""
    repeats = list(zip(*summaries, strict=True))  # [repeat][stage]
    events = [tuple(e for stage in repeat for e in stage["events"]) for repeat in repeats]
    spans = [makespan_ns(of_repeat) for of_repeat in events]
    median = sorted(range(len(spans)), key=spans.__getitem__)[(len(spans) - 1) // 2]
    chosen = repeats[median]
    m, losses = case.num_microbatches, chosen[-1]["losses"]
    memory = [stage["peak_memory_bytes"] for stage in chosen]
    waited = [stage["waited_for_host"] for stage in chosen]
    return MeasuredRun(
        name=case.name,
        schedule=case.schedule,
        policy=case.policy,
        num_microbatches=m,
        num_batches=config["num_batches"],
        events=events[median],
        repeat_makespans_ns=tuple(spans),
        peak_versions=tuple(stage["peak_versions"] for stage in chosen),
        peak_memory_bytes=None if None in memory else tuple(memory),
        waited_for_host=None if None in waited else tuple(waited),
        losses=tuple(
            sum(losses[b * m + i] for i in range(m)) / m for b in range(config["num_batches"])
        ),
    )


def _alone(config: Config, case: Case, device: torch.device) -> list[Weights]:
    return train_alone(config, case.schedule, case.policy, case.num_microbatches, device)


def _gather(item: Any, process: Process) -> list[Any] | None:
    items: list[Any] | None = [None] * process.world_size if process.rank == 0 else None
    with connection_to("the other stages"):
        dist.gather_object(item, items)
    return items


def _describe(config: Config, device: torch.device, workload: Workload) -> str:
    p = config["num_stages"]
    forward, backward = emulated_ms(config, device)
    where, gpus = "NCCL, a GPU each", torch.cuda.device_count()
    if device.type == "cpu":
        few = gpus and config["device"] == "auto"
        where = "gloo, on the CPU" + f", as there are {gpus} GPUs for {p} stages" * bool(few)
    lines = [f"{count(p, 'stage')}, a process each ({where}): {workload.text}"]
    if forward or backward:
        lines.append(
            f"emulated device: each forward sleeps {forward:g} ms and each backward "
            f"{backward:g} ms on top of its small real computation"
        )
    return "\n".join(lines)


def about(config: Config, arguments: list[str]) -> dict[str, Any]:
    """What a record says of how it came about: command, versions, machine, emulation, workload,
    CONFIG."""
    on_gpu = on_gpus(config)
    device = torch.device("cuda" if on_gpu else "cpu")
    forward, backward = emulated_ms(config, device)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if on_gpu:
        versions |= {
            "cuda": str(torch.version.cuda),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return {
        "command": " ".join(["python pipedream_runtime.py", *arguments]),
        "versions": versions,
        "machine": {
            "device": device_name(device),
            "gpus": torch.cuda.device_count() if on_gpu else 0,
            "cores": os.cpu_count(),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "emulated_ms": {"forward": forward, "backward": backward},
        "workload": describe_workload(config, device),
        "config": {key: config[key] for key in sorted(config)},
    }
