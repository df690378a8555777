"""All runs of one start, in one process of several: every schedule at every size, and orders that
are found on the way."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipedream.errors import UserError
from pipedream.runtime.channels import Peer, connect, connection_to, exchange, gather_weights
from pipedream.runtime.launch import CASE, Process
from pipedream.runtime.prediction import Case, MeasuredRun, calibrate, makespan_ns, recut
from pipedream.runtime.record import build_record, render, write_trace, write_whole
from pipedream.runtime.stage import RankRun, Station, run_rank, warm_up_compute
from pipedream.runtime.workload import (
    Config,
    build_workload,
    describe,
    equal_bits,
    on_gpus,
    train_alone,
)
from pipedream.schedules.catalogue import FOUND, schedule_for_training
from pipedream.schedules.ops import Schedule, repeat
from pipedream.schedules.policies import POLICIES, Policy
from pipedream.simulate.search import as_schedule, search
from pipedream.simulate.simulator import load_order
from pipedream.simulate.trace import MeasuredEvent, transfers
from pipedream.train.oracle import batch_losses
from pipedream.train.trainer import Weights


def build_cases(config: Config) -> list[Case]:
    """Every schedule at every number of microbatches, and a search for every limit on memory.

    Raises UserError for what cannot be trained, and for a search that has no durations to go by.
    """
    cases = []
    for name in config["schedule"]:
        limits = (config["memory"] or [config["num_stages"]]) if name == "search" else [None]
        for limit in limits:
            for m in config["num_microbatches"]:
                schedule, policy = _orders_of("1f1b" if limit else name, config, m)
                case = Case(
                    name=f"{FOUND}{limit}" if limit else name,
                    num_microbatches=m,
                    num_batches=config["num_batches"],
                    schedule=schedule,
                    policy=policy,
                    memory=limit,
                )
                cases.append(case)
    first = cases[0]
    if any(case.memory for case in cases) and (first.memory or not first.schedule.cuts_backward):
        what = "nothing runs" if first.memory else f"{first.name} does not cut its backward passes"
        raise UserError(
            f"schedule=search takes measured times of F, I and W, and {what} before it",
            "set schedule=zb-h1,search",
        )
    return cases


def _orders_of(name: str, config: Config, m: int) -> tuple[Schedule, Policy]:
    """The orders over all batches of a schedule that has a name, or of a CSV's."""
    p = config["num_stages"]
    num_batches = config["num_batches"]
    if not name.lower().endswith(".csv"):
        return schedule_for_training(name, p, m, num_batches)
    batch = load_order(Path(name))
    if (batch.num_ranks, batch.num_microbatches) != (p, m):
        raise UserError(
            f"{name} has {batch.num_ranks} ranks and {batch.num_microbatches} microbatches",
            f"set num_stages={batch.num_ranks} and num_microbatches={batch.num_microbatches}",
        )
    return repeat(batch, num_batches), POLICIES["flush"]


def _found_case(config: Config, case: Case, chosen: MeasuredRun | None) -> Case:
    """The case with the shortest order for the measured times that rank 0 finds, on all ranks."""
    words = None
    if chosen is not None:
        assert case.memory is not None
        costs = recut(calibrate(chosen.events, chosen.case.schedule), config["num_stages"])
        words = search(costs, case.num_microbatches, case.memory).words
    schedule = as_schedule(exchange(words)[0], case.name)
    return replace(case, schedule=repeat(schedule, case.num_batches))


def run_session(config: Config, how: dict[str, Any], process: Process) -> None:
    """Run all cases as one of the stages; on rank 0 also print and write what came of it.

    `how`: what a record says of how it came about.
    """
    cases = build_cases(config)
    device = _take_device(config, process)
    timeout = datetime.timedelta(seconds=config["timeout_s"])
    # Of gloo, for barriers and results, on a GPU as well.
    dist.init_process_group("gloo", timeout=timeout)
    first = process.rank == 0
    if first:
        print(describe(config, device), flush=True)
    pairs = set()
    for case in cases:
        ranks = case.schedule.ranks()
        pairs |= {(ranks[sender], ranks[receiver]) for sender, receiver in transfers(case.schedule)}
    max_ctas = config["nccl_max_ctas"]
    peers = connect(process.rank, pairs, device=device, timeout=timeout, max_ctas=max_ctas)
    stations: dict[tuple[int, ...], Station] = {}
    for case in cases:
        stages = tuple(case.schedule.stages()[process.rank])
        if stages not in stations:
            stations[stages] = _build_station(config, process, device, stages, peers)
            warm_up_compute(stations[stages], case)
    runs: list[MeasuredRun] = []
    chosen = None  # the run that durations are from
    for case in cases:
        if first and CASE in os.environ:
            Path(os.environ[CASE]).write_text(case.name)
        if case.memory is not None:
            case = _found_case(config, case, chosen)
        station = stations[tuple(case.schedule.stages()[process.rank])]
        repeats = _run_case(config, station, case)
        weights = gather_weights(repeats[-1].weights)
        by_rank = exchange([own._replace(weights={}) for own in repeats])
        if not first:
            continue
        run = _measured_run(case, [[RankRun(*own) for own in rank] for rank in by_rank], weights)
        runs.append(run)
        if chosen is None and case.num_microbatches == config["calibrate_on"]:
            chosen = run
        print(
            f"  {case.name}, m={case.num_microbatches}: {makespan_ns(run.events) / 1e9:.3f} s",
            flush=True,
        )
        if chosen and config["record"]:  # so that a case that fails does not take the others along
            write_whole(config["record"], build_record(runs, chosen, how))
    with connection_to("the other stages"):
        dist.barrier()
    dist.destroy_process_group()
    if not first:
        return
    assert chosen is not None
    if config["check_weights"]:  # only now: the others would wait for it, and not for ever
        print("  training in one process, to compare the weights", flush=True)
        for run in runs:
            run.weights_equal = equal_bits(run.weights, train_alone(config, run.case, device))
    record = build_record(runs, chosen, how)
    print(render(record), flush=True)
    if config["record"]:
        write_whole(config["record"], record)
    if config["trace"]:
        write_trace(config["trace"], runs[-1], chosen)
    if config["weights"]:  # {(schedule, m): [the weights of each stage, by name]}
        found = {(run.case.name, run.case.num_microbatches): run.weights for run in runs}
        torch.save(found, config["weights"])


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
    stages: Sequence[int],
    peers: dict[int, Peer],
) -> Station:
    """For the schedules under which this rank holds these stages; of a workload's stages only they
    are kept. Where a rank holds v, the model is cut into v stages for each rank."""
    workload = build_workload(config, device, chunks=len(stages))
    return Station(
        rank=process.rank,
        config=config,
        device=device,
        modules={stage: workload.modules[stage].cpu() for stage in stages},
        num_stages=len(workload.modules),
        loss=workload.loss,
        task=workload.task,
        peers=peers,
    )


def _run_case(config: Config, station: Station, case: Case) -> list[RankRun]:
    """The repeats, the last one with its weights if they are wanted. Warm-up runs come first;
    nothing is slept in them."""
    for _ in range(config["warmups"]):
        run_rank(station, case)
    wanted = config["check_weights"] or config["weights"]
    last = config["repeats"] - 1
    return [
        run_rank(station, case, emulated=True, keep_weights=bool(wanted) and number == last)
        for number in range(config["repeats"])
    ]


def _measured_run(
    case: Case, by_rank: Sequence[list[RankRun]], weights: list[Weights]
) -> MeasuredRun:
    """Of the repeats the one with the median makespan (of an even number, the faster middle)."""
    repeats = list(zip(*by_rank, strict=True))
    events = [
        [MeasuredEvent(*event) for rank in repeat for event in rank.events] for repeat in repeats
    ]
    spans = list(map(makespan_ns, events))
    median = sorted(range(len(spans)), key=spans.__getitem__)[(len(spans) - 1) // 2]
    chosen = repeats[median]
    versions = sorted(pair for rank in chosen for pair in rank.peak_versions)
    losses = dict(pair for rank in chosen for pair in rank.losses)
    on_gpu = chosen[0].peak_memory_bytes is not None
    return MeasuredRun(
        case=case,
        events=events[median],
        repeat_makespans_ns=spans,
        peak_versions=[count for _, count in versions],
        peak_memory_bytes=[rank.peak_memory_bytes for rank in chosen] if on_gpu else None,
        waited_for_host=[rank.waited_for_host for rank in chosen] if on_gpu else None,
        losses=batch_losses(losses, case.num_microbatches, case.num_batches),
        weights=weights,
    )
