"""All runs of one start, in one process of several: every schedule at every size, and orders that
are found on the way."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from pipedream.errors import UserError
from pipedream.runtime.channels import Peer, connect, connection_to, exchange, gather_weights
from pipedream.runtime.launch import Process, meet
from pipedream.runtime.prediction import Case, MeasuredRun, calibrate, makespan_ns, recut
from pipedream.runtime.stage import (
    RankRun,
    Station,
    build_clock,
    pace_from_ms,
    run_rank,
    warm_up_compute,
)
from pipedream.runtime.workload import (
    Config,
    build_workload,
    describe,
    emulated_ms,
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


def _found_case(config: Config, case: Case, runs: Sequence[MeasuredRun]) -> Case:
    """The case with the shortest order for the measured times that rank 0 finds, on all ranks."""
    words = None
    if dist.get_rank() == 0:
        chosen = calibration(runs, config)
        assert chosen is not None
        assert case.memory is not None
        costs = recut(calibrate(chosen.events, chosen.case.schedule), config["num_stages"])
        words = search(costs, case.num_microbatches, case.memory).words
    schedule = as_schedule(exchange(words)[0], case.name)
    return replace(case, schedule=repeat(schedule, case.num_batches))


def calibration(runs: Sequence[MeasuredRun], config: Config) -> MeasuredRun | None:
    """The run that durations are from, once it has been run."""
    return next((run for run in runs if run.case.num_microbatches == config["calibrate_on"]), None)


def run_session(
    config: Config,
    process: Process,
    *,
    keep_weights: bool,
    say: Callable[[str], None],
    keep: Callable[[list[MeasuredRun]], None],
    begin: Callable[[str], None],
) -> list[tuple[MeasuredRun, list[Weights]]]:
    """Run all cases; on rank 0 what came of each, with the weights by stage where they were asked
    for; nothing on the others.

    On rank 0 `say` prints, and `keep` gets the runs so far, after each. `begin` gets the name of
    each case before it runs.
    """
    cases = build_cases(config)
    device = _take_device(config, process)
    timeout = datetime.timedelta(seconds=float(config["timeout_s"]))
    meet(process, timeout)
    if process.rank == 0:
        say(describe(config, device))
    pairs = set()
    for case in cases:
        ranks = case.schedule.ranks()
        pairs |= {(ranks[sender], ranks[receiver]) for sender, receiver in transfers(case.schedule)}
    max_ctas = config["nccl_max_ctas"]
    peers = connect(process.rank, pairs, device=device, timeout=timeout, max_ctas=max_ctas)
    stations: dict[tuple[int, ...], Station] = {}
    runs: list[MeasuredRun] = []
    weights: list[list[Weights]] = []
    wanted = keep_weights or config["check_weights"]
    for case in cases:
        stages = tuple(case.schedule.stages()[process.rank])
        if stages not in stations:
            stations[stages] = _build_station(config, process, device, stages, peers)
            warm_up_compute(stations[stages], case)
    for place, case in enumerate(cases):
        begin(case.name)
        if case.memory is not None:
            case = cases[place] = _found_case(config, case, runs)
        station = stations[tuple(case.schedule.stages()[process.rank])]
        repeats = _run_case(config, station, case, keep_weights=wanted)
        weights.append(gather_weights(repeats[-1].weights))
        by_rank = exchange([own._replace(weights={}) for own in repeats])
        if process.rank != 0:
            continue
        runs.append(_measured_run(case, [[RankRun(*own) for own in rank] for rank in by_rank]))
        say(f"  {case.name}, m={case.num_microbatches}: {makespan_ns(runs[-1].events) / 1e9:.3f} s")
        keep(runs)
    with connection_to("the other stages"):
        dist.barrier()
    dist.destroy_process_group()
    if process.rank != 0:
        return []
    if config["check_weights"]:  # only now: the others would wait for it, and not for ever
        say("  training in one process, to compare the weights")
        for place, (case, ours) in enumerate(zip(cases, weights, strict=True)):
            equal = equal_bits(ours, train_alone(config, case, device))
            runs[place] = replace(runs[place], weights_equal=equal)
        keep(runs)
    return list(zip(runs, weights, strict=True))


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
        modules={stage: workload.modules[stage].cpu() for stage in stages},
        num_stages=len(workload.modules),
        loss=workload.loss,
        task=workload.task,
        peers=peers,
        clock=build_clock(device),
        receive_depth=config["receive_depth"],
        learning_rate=config["learning_rate"],
        device=device,
    )


def _run_case(config: Config, station: Station, case: Case, *, keep_weights: bool) -> list[RankRun]:
    """The repeats, the last one with its weights if they are wanted. Warm-up runs come first;
    nothing is slept in them."""
    for _ in range(config["warmups"]):
        run_rank(station, case, pace_from_ms(0, 0))
    pace = pace_from_ms(*emulated_ms(config, station.device), case.schedule.stages_per_rank)
    last = config["repeats"] - 1
    return [
        run_rank(station, case, pace, keep_weights=keep_weights and number == last)
        for number in range(config["repeats"])
    ]


def _measured_run(case: Case, by_rank: Sequence[list[RankRun]]) -> MeasuredRun:
    """Of the repeats the one with the median makespan (of an even number, the faster middle)."""
    repeats = list(zip(*by_rank, strict=True))
    events = [[MeasuredEvent(*e) for rank in repeat for e in rank.events] for repeat in repeats]
    spans = list(map(makespan_ns, events))
    median = sorted(range(len(spans)), key=spans.__getitem__)[(len(spans) - 1) // 2]
    chosen = repeats[median]
    versions = sorted(kept for rank in chosen for kept in rank.peak_versions)
    losses = dict(loss for rank in chosen for loss in rank.losses)
    memory = [rank.peak_memory_bytes for rank in chosen if rank.peak_memory_bytes is not None]
    waited = [rank.waited_for_host for rank in chosen if rank.waited_for_host is not None]
    return MeasuredRun(
        case=case,
        events=tuple(events[median]),
        repeat_makespans_ns=tuple(spans),
        peak_versions=tuple(count for _, count in versions),
        peak_memory_bytes=tuple(memory) or None,
        waited_for_host=tuple(waited) or None,
        losses=tuple(batch_losses(losses, case.num_microbatches, case.num_batches)),
    )
