"""Run every requested schedule with every number of microbatches, and search for orders if
requested. Each stage's process runs this code."""

import json
import os
import platform
import sys
from collections.abc import Mapping
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pipedream_simple import from_words

from pipedream.errors import UserError
from pipedream.runtime.launch import WEIGHTS_DIFFER
from pipedream.runtime.record import (
    Case,
    MeasuredRun,
    build_record,
    device_name,
    render,
    write_atomically,
)
from pipedream.runtime.stage import RankRunner, connection_to
from pipedream.schedules.ops import Schedule, build_from_orders, repeat
from pipedream.schedules.orders import SCHEDULES, SEARCH_PREFIX, schedule_for_training
from pipedream.schedules.policies import POLICIES, Policy
from pipedream.simulate.search import search
from pipedream.simulate.simulator import load_order
from pipedream.train.models import Config, Workload, count
from pipedream.train.oracle import run_schedule
from pipedream.train.trainer import StageTrainer, Weights, build_trainers


def build_cases(config: Config) -> list[Case]:
    """Return one case per schedule and number of microbatches. For a search, return one case per
    memory limit and number of microbatches. Raises UserError for schedules that cannot be trained,
    and for a search without measured durations."""
    cases = []
    for schedule_name in config["schedule"]:
        limits = [None]
        if schedule_name == "search":
            limits = config["memory"] or [config["num_stages"]]
        for limit, m in product(limits, config["num_microbatches"]):
            schedule, policy = _build_or_load("1f1b" if limit else schedule_name, config, m)
            name = f"{SEARCH_PREFIX}{limit}" if limit else schedule_name
            cases.append(Case(name, m, schedule, policy, limit))
    first = cases[0]
    if any(case.memory for case in cases) and (first.memory or not first.schedule.splits_backward):
        problem = "no schedule runs before it"
        if not first.memory:
            problem = f"{first.name}, which runs first, does not split its backward passes"
        raise UserError(
            f"schedule=search needs measured times of F, I and W, but {problem}",
            "set schedule=zb-h1,search",
        )
    return cases


def _build_or_load(name: str, config: Config, m: int) -> tuple[Schedule, Policy]:
    """Return the schedule for all batches, and its weight policy. `name` is the name of a schedule
    or the path of a CSV file."""
    if name in SCHEDULES:
        return schedule_for_training(name, config["num_stages"], m, config["num_batches"])
    batch = load_order(Path(name))
    if (batch.num_ranks, batch.num_microbatches) != (config["num_stages"], m):
        raise UserError(
            f"{name} has {batch.num_ranks} ranks and {batch.num_microbatches} microbatches",
            f"set num_stages={batch.num_ranks} and num_microbatches={batch.num_microbatches}",
        )
    return repeat(batch, config["num_batches"]), POLICIES["flush"]


def gather_json(value: Any) -> list[Any]:
    """Return the values of all ranks, in rank order. Values are sent as JSON, because unpickling
    can execute code. All ranks must call this function."""
    encoded = json.dumps(value).encode()
    longest = torch.tensor(len(encoded))
    with connection_to("the other stages"):
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        padded = torch.frombuffer(bytearray(encoded.ljust(int(longest))), dtype=torch.uint8)
        texts = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
        dist.all_gather(texts, padded)
    return [json.loads(text.numpy().tobytes()) for text in texts]


def gather_weights(
    case: Case, workload: Workload, own_weights: Mapping[int, Weights]
) -> list[Weights]:
    """On rank 0, return the weights of every stage. Return an empty list on other ranks. All ranks
    must call this function."""
    if dist.get_rank() > 0:
        for weight in chain.from_iterable(weights.values() for weights in own_weights.values()):
            dist.send(weight.contiguous(), 0)
        return []
    final_weights = dict(own_weights)
    modules = workload.build_modules(case.schedule.stages_per_rank)  # for names and shapes
    for rank, stages in enumerate(case.schedule.stages_by_rank()[1:], 1):
        for stage in stages:
            parameters = modules[stage].named_parameters()
            final_weights[stage] = {
                name: torch.empty_like(w, device="cpu") for name, w in parameters
            }
            for weight in final_weights[stage].values():
                dist.recv(weight, rank)
    return [final_weights[stage] for stage in range(len(modules))]


def run_session(config: Config, command: str, rank: int) -> None:
    """Run all cases as one of the stages. Rank 0 prints the results and writes them to the files
    that `config` lists under record and weights."""
    cases = build_cases(config)
    runner = RankRunner(rank, config)
    if rank == 0:
        print(describe(runner), flush=True)
    runner.connect_and_warm_up(cases)
    run_metadata = describe_environment(runner, command)
    runs: list[MeasuredRun] = []
    calibration_run: MeasuredRun | None = None  # run whose durations predict all runs
    for case in cases:
        if case.memory is not None:  # rank 0 searches for an order and sends it to the others
            words = None
            if calibration_run is not None:
                costs = calibration_run.costs(config["num_stages"])
                found_schedule = search(costs, case.num_microbatches, case.memory).schedule
                words = ["".join(op.kind for op in order) for order in found_schedule.flat]
            found_order = build_from_orders(case.name, from_words(gather_json(words)[0]))
            case = case._replace(schedule=repeat(found_order, config["num_batches"]))
        for _ in range(config["warmups"]):  # warm-up runs do not sleep
            runner.run(case)
        repeats = []
        for _ in range(config["repeats"]):
            report, weights = runner.run(case, emulated=True)
            repeats.append(report)
        by_rank = gather_json(repeats)
        needs_weights = config["check_weights"] or config["weights"]
        by_stage = gather_weights(case, runner.workload, weights) if needs_weights else []
        if rank > 0:
            continue
        run = MeasuredRun(case, by_rank, by_stage)
        runs.append(run)
        if calibration_run is None and case.num_microbatches == config["calibrate_on"]:
            calibration_run = run
        print(
            f"  {case.name}, m={case.num_microbatches}: {run.measured['makespan_ms'] / 1000:.3f} s",
            flush=True,
        )
        if calibration_run and config["record"]:  # keeps these cases if a later case fails
            write_atomically(config["record"], build_record(runs, calibration_run, run_metadata))
    with connection_to("the other stages"):
        dist.barrier()
    dist.destroy_process_group()
    if rank > 0:
        return
    assert calibration_run is not None
    if config["check_weights"]:  # at the end, because the other ranks would time out meanwhile
        print("  training in one process, to compare the weights", flush=True)
        for run in runs:
            schedule, m = run.case.schedule, run.case.num_microbatches
            trainers = build_trainers(runner.workload, schedule, run.case.policy, m)
            run_schedule(schedule, trainers, runner.workload.task)
            same = map(_bitwise_equal, run.weights, trainers.values())
            run.measured["weights_equal"] = all(same)
    record = build_record(runs, calibration_run, run_metadata)
    print(render(record), flush=True)
    if config["record"]:
        write_atomically(config["record"], record)
    if config["weights"]:  # {(schedule, m): [the weights of each stage, by name]}
        weights_by_run = {(run.case.name, run.case.num_microbatches): run.weights for run in runs}
        torch.save(weights_by_run, config["weights"])
    differing = [run.case.name for run in runs if run.measured["weights_equal"] is False]
    if differing:
        print(
            "error: The weights trained under these schedules differ from those of one process: "
            + ", ".join(differing),
            file=sys.stderr,
        )
        raise SystemExit(WEIGHTS_DIFFER)


def describe(runner: RankRunner) -> str:
    """Return a description of the run: its stages, device and workload."""
    p, gpus = runner.config["num_stages"], torch.cuda.device_count()
    backend_text = "NCCL, one GPU per process" if runner.on_gpu else "gloo, on the CPU"
    if gpus and not runner.on_gpu and runner.config["device"] == "auto":
        backend_text += f", because there are only {gpus} GPUs for {p} stages"
    text = f"{count(p, 'stage')}, one process per stage ({backend_text}): {runner.workload.text}"
    if any(runner.sleep_ms):
        forward, backward = runner.sleep_ms
        text += (
            f"\nemulated device: each forward pass sleeps for {forward:g} ms and each backward "
            f"{backward:g} ms on top of its small real computation"
        )
    return text


def describe_environment(runner: RankRunner, command: str) -> dict[str, Any]:
    """Return the record fields that describe the command, machine, versions and workload."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if runner.on_gpu:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        versions |= {"cuda": str(torch.version.cuda), "nccl": nccl}
    return {
        "command": command,
        "versions": versions,
        "machine": {
            "device": device_name(runner.device),
            "gpus": torch.cuda.device_count() if runner.on_gpu else 0,
            "cores": os.cpu_count(),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "emulated_ms": dict(zip(("forward", "backward"), runner.sleep_ms, strict=True)),
        "workload": runner.workload.text,
        "config": {key: runner.config[key] for key in sorted(runner.config)},
    }


def _bitwise_equal(ours: Weights, reference: StageTrainer) -> bool:
    """Return whether all weights are bitwise equal. Bits are compared because NaN does not equal
    NaN."""
    pairs = ((ours[name], w.detach().cpu()) for name, w in reference.weights.items())
    return all(torch.equal(*(w.flatten().view(torch.uint8) for w in pair)) for pair in pairs)
