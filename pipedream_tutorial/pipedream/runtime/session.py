"""All runs of one start of the runtime, in one process of several: set up once, run every case."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from pipedream.runtime.cases import Case, Config, build_cases, found_case
from pipedream.runtime.channels import Peer, connect, connection_to
from pipedream.runtime.clocks import build_clock
from pipedream.runtime.launch import Process, meet
from pipedream.runtime.prediction import MeasuredRun, makespan_ns
from pipedream.runtime.stage import Station, pace_from_ms, run_rank, warm_up_compute
from pipedream.runtime.workload import (
    build_workload,
    describe,
    emulated_ms,
    equal_bits,
    on_cpu,
    on_gpus,
    train_alone,
)
from pipedream.schedules.ops import Schedule
from pipedream.simulate.trace import transfers
from pipedream.train.trainer import Weights

Summary = dict[str, Any]
"""What rank 0 needs to know of one repeat on one stage: plain data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What rank 0 knows after all runs."""

    runs: list[MeasuredRun]
    weights: list[list[Weights]]
    """By run, then by stage; empty unless they were asked for."""


def run_session(
    config: Config,
    process: Process,
    *,
    keep_weights: bool,
    say: Callable[[str], None],
    keep: Callable[[list[MeasuredRun]], None],
    begin: Callable[[str], None] = lambda name: None,
) -> Outcome | None:
    """Run all cases; what came of them on rank 0, None on the others.

    On rank 0 `say` prints, and `keep` gets the runs so far, after each. `begin` gets the name of
    each case before it runs.
    """
    cases = build_cases(config)
    device = _take_device(config, process)
    timeout = datetime.timedelta(seconds=float(config["timeout_s"]))
    meet(process, timeout)
    if process.rank == 0:
        say(describe(config, device))
    peers = _connect(config, process, device, cases, timeout)
    stations = _build_stations(config, process, device, cases, peers)
    for station in stations.values():
        warm_up_compute(station)
    runs: list[MeasuredRun] = []
    weights: list[list[Weights]] = []
    wanted = keep_weights or config["check_weights"]
    for place, case in enumerate(cases):
        begin(case.name)
        if case.memory is not None:
            case = cases[place] = found_case(config, case, runs)
        station = stations[_placement(case.schedule, process.rank)]
        gathered = _gather(_run_case(config, station, case, with_weights=wanted), process)
        if gathered is None:
            continue
        summaries, stage_weights = zip(*gathered, strict=True)
        runs.append(_measured_run(config, case, summaries))
        weights.append(_in_order(stage_weights))
        say(f"  {case.name}, m={case.num_microbatches}: {makespan_ns(runs[-1].events) / 1e9:.3f} s")
        keep(runs)
    with connection_to("the other stages"):
        dist.barrier()
    dist.destroy_process_group()
    if process.rank != 0:
        return None
    if config["check_weights"]:  # only now: the others would wait for it, and not for ever
        say("  training in one process, to compare the weights")
        runs = _compared(config, cases, runs, weights, device)
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


def _connect(
    config: Config,
    process: Process,
    device: torch.device,
    cases: Sequence[Case],
    timeout: datetime.timedelta,
) -> dict[int, Peer]:
    """All peers that some case sends messages between."""
    pairs = set()
    for case in cases:
        ranks = case.schedule.ranks()
        pairs |= {(ranks[sender], ranks[receiver]) for sender, receiver in transfers(case.schedule)}
    return connect(
        process.rank,
        pairs,
        backend="nccl" if device.type == "cuda" else "gloo",
        device=device,
        timeout=timeout,
        max_ctas=config["nccl_max_ctas"],
    )


Placement = tuple[int, ...]
"""The stages of one rank; where a rank holds v, the model is cut into v stages for each rank."""


def _placement(schedule: Schedule, rank: int) -> Placement:
    return tuple(sorted({op.stage for item in schedule.orders[rank] for op in item.parts}))


def _build_stations(
    config: Config,
    process: Process,
    device: torch.device,
    cases: Sequence[Case],
    peers: dict[int, Peer],
) -> dict[Placement, Station]:
    """One for each set of stages that this rank holds in some case; of a workload's stages only
    its own are kept."""
    found = {}
    for stages in dict.fromkeys(_placement(case.schedule, process.rank) for case in cases):
        workload = build_workload(config, device, chunks=len(stages))
        example, _ = workload.task.microbatch(0)
        found[stages] = Station(
            rank=process.rank,
            modules={stage: workload.modules[stage].cpu() for stage in stages},
            num_stages=len(workload.modules),
            loss=workload.loss,
            task=workload.task,
            peers=peers,
            form=(tuple(example.shape), example.dtype),
            clock=build_clock(device),
            receive_depth=config["receive_depth"],
            learning_rate=config["learning_rate"],
            device=device,
        )
    return found


def _run_case(
    config: Config, station: Station, case: Case, *, with_weights: bool
) -> tuple[list[Summary], dict[int, Weights]]:
    """Of each repeat what rank 0 needs to know, and the last one's weights by
    stage if they are wanted.

    Warm-up runs come first; nothing is slept in them.
    """
    sizes = {"num_microbatches": case.num_microbatches, "num_batches": config["num_batches"]}
    for _ in range(config["warmups"]):
        run_rank(station, case.schedule, case.policy, pace=pace_from_ms(0, 0), **sizes)
    pace = pace_from_ms(*emulated_ms(config, station.device), case.schedule.stages_per_rank)
    summaries: list[Summary] = []
    weights: dict[int, Weights] = {}
    for number in range(config["repeats"]):
        run = run_rank(station, case.schedule, case.policy, pace=pace, **sizes)
        summaries.append(
            {
                "events": run.events,
                "peak_versions": {s: t.peak_versions for s, t in run.trainers.items()},
                "peak_memory_bytes": run.peak_memory_bytes,
                "waited_for_host": run.waited_for_host,
                "losses": {
                    i: float(loss) for t in run.trainers.values() for i, loss in t.losses.items()
                },
            }
        )
        if with_weights and number == config["repeats"] - 1:
            weights = {stage: on_cpu(t.weights) for stage, t in run.trainers.items()}
        del run  # or its memory would count in the next one's peak
    return summaries, weights


def _measured_run(config: Config, case: Case, summaries: tuple[list[Summary], ...]) -> MeasuredRun:
    """Of the repeats the one with the median makespan (of an even number, the faster middle)."""
    repeats = list(zip(*summaries, strict=True))  # [repeat][stage]
    events = [tuple(e for stage in repeat for e in stage["events"]) for repeat in repeats]
    spans = [makespan_ns(of_repeat) for of_repeat in events]
    median = sorted(range(len(spans)), key=spans.__getitem__)[(len(spans) - 1) // 2]
    chosen = repeats[median]
    m = case.num_microbatches
    losses = next(rank["losses"] for rank in chosen if rank["losses"])
    versions = sorted(kept for rank in chosen for kept in rank["peak_versions"].items())
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
        peak_versions=tuple(count for _, count in versions),
        peak_memory_bytes=None if None in memory else tuple(memory),
        waited_for_host=None if None in waited else tuple(waited),
        losses=tuple(
            sum(losses[b * m + i] for i in range(m)) / m for b in range(config["num_batches"])
        ),
    )


def _in_order(by_rank: Sequence[dict[int, Weights]]) -> list[Weights]:
    """Weights by stage."""
    by_stage = {stage: own for of_rank in by_rank for stage, own in of_rank.items()}
    return [own for _, own in sorted(by_stage.items())]


def _compared(
    config: Config,
    cases: Sequence[Case],
    runs: Sequence[MeasuredRun],
    weights: Sequence[list[Weights]],
    device: torch.device,
) -> list[MeasuredRun]:
    """The runs, each with whether its weights are those that one process comes to."""
    return [
        replace(
            run,
            weights_equal=equal_bits(
                ours, train_alone(config, case.schedule, case.policy, case.num_microbatches, device)
            ),
        )
        for case, run, ours in zip(cases, runs, weights, strict=True)
    ]


def _gather(item: Any, process: Process) -> list[Any] | None:
    items: list[Any] | None = [None] * process.world_size if process.rank == 0 else None
    with connection_to("the other stages"):
        dist.gather_object(item, items)
    return items
