"""The real thing: one process a stage, gloo on the CPU, NCCL on GPUs, measured against prediction.

    python pipedream_runtime.py --num_stages 4
    torchrun --nproc_per_node=4 pipedream_runtime.py
    python pipedream_runtime.py --benchmark --set num_stages=4 --record out.json

Every schedule runs at every number of microbatches. One of the runs tells how long the stages
take; fed with that, the simulator predicts the others. --benchmark changes CONFIG's defaults to a
measurement of GPT-2 medium's blocks on GPUs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pipedream.config import Rule, main_with_errors, parse_arguments
from pipedream.errors import UserError
from pipedream.launch import Process, launch, run_worker, this_process
from pipedream.prediction import MeasuredRun, build_record, calibrate, can_predict, predict
from pipedream.schedules import SCHEDULES, build_schedule
from pipedream.trace import write_trace

if TYPE_CHECKING:
    from pipedream.session import Outcome

CONFIG: dict[str, Any] = {
    "num_stages": 4,  # p: processes, each with one stage of the model
    "num_microbatches": [4, 8],  # m: microbatches in a batch; one run for each
    "num_batches": 2,  # batches in a run; what does not flush runs through without a pause
    "schedule": ["gpipe", "1f1b", "pipedream"],  # one run for each
    "model": "mlp",  # mlp (small, for the CPU), gpt2-tiny or gpt2-medium (blocks only)
    "layers_per_stage": None,  # None: 2 of mlp, an even share of the blocks of a gpt2
    "microbatch_size": None,  # samples or sequences; None: 8 of mlp, 4 of a gpt2
    "dtype": None,  # None: float64 for mlp; for a gpt2 bfloat16 on a GPU, float32 on the CPU
    "device": "auto",  # auto: GPUs where there are any
    "forward_ms": 10,  # on the CPU each forward also sleeps this long: it emulates a device
    "backward_ms": 20,  # the same for a whole backward; 0 and 0: only the real computation
    "learning_rate": 0.1,
    "seed": 0,
    "repeats": 1,  # timed runs of each case; the one with the median makespan is reported
    "warmups": 1,  # runs of each case before those, not timed
    "receive_depth": 2,  # receives that are posted before they are asked for
    "calibrate_on": None,  # the m of the run, of the first schedule, that durations are from
    "check_weights": True,  # train in one process, too, and compare the final weights bit for bit
    "timeout_s": 120,  # a stage that waits longer for another one gives up
}

BENCHMARK: dict[str, Any] = {
    "num_microbatches": [4, 8, 16, 32],
    "num_batches": 3,
    "model": "gpt2-medium",
    "forward_ms": 0,
    "backward_ms": 0,
    "learning_rate": 0.01,
    "repeats": 5,
    "warmups": 2,
    "calibrate_on": 8,
    "check_weights": False,
}

RULES: dict[str, Rule] = {
    "num_stages": Rule(text="stages p, one process each", kind=int, low=1, high=64),
    "num_microbatches": Rule(
        text="microbatches m in a batch, one run for each", kind=int, many=True, low=1, high=4096
    ),
    "num_batches": Rule(text="batches in a run", kind=int, low=1, high=1000),
    "schedule": Rule(
        text="one run for each; all: those with one stage a rank, the others are simulated only",
        kind=str,
        many=True,
        choices=("all", *SCHEDULES),
    ),
    "model": Rule(
        text="what is trained; of gpt2 the blocks only",
        kind=str,
        choices=("mlp", "gpt2-tiny", "gpt2-medium"),
    ),
    "layers_per_stage": Rule(
        text="None: 2 of mlp, an even share of the blocks of a gpt2",
        kind=int,
        none=True,
        low=1,
        high=256,
    ),
    "microbatch_size": Rule(
        text="samples or sequences in a microbatch; None: 8 of mlp, 4 of a gpt2",
        kind=int,
        none=True,
        low=1,
        high=512,
    ),
    "dtype": Rule(
        text="None: float64 for mlp; for a gpt2 bfloat16 on a GPU, float32 on the CPU",
        kind=str,
        none=True,
        choices=("float64", "float32", "bfloat16"),
    ),
    "device": Rule(text="auto: GPUs if any", kind=str, choices=("auto", "cpu", "cuda")),
    "forward_ms": Rule(
        text="each forward on the CPU also sleeps this long, to emulate a device",
        kind=float,
        low=0,
        high=10_000,
    ),
    "backward_ms": Rule(text="the same for a whole backward", kind=float, low=0, high=10_000),
    "learning_rate": Rule(text="of plain SGD", kind=float, low=0, high=100),
    "seed": Rule(text="of weights and data", kind=int, low=0, high=10**6),
    "repeats": Rule(text="timed runs of each case", kind=int, low=1, high=1000),
    "warmups": Rule(text="runs of each case before those", kind=int, low=0, high=1000),
    "receive_depth": Rule(text="receives posted ahead", kind=int, low=0, high=64),
    "calibrate_on": Rule(
        text="the m of the run, of the first schedule, that durations are from; None: the first m",
        kind=int,
        none=True,
    ),
    "check_weights": Rule(text="compare with the one-process run bit for bit", kind=bool),
    "timeout_s": Rule(text="longest wait for another stage, seconds", kind=float, low=1, high=3600),
}

EXTRA = {
    "trace": "write a Perfetto trace of the last run, predicted and measured",
    "record": "write all measured and predicted numbers as JSON",
    "weights": "write the final weights of every run with torch.save",
}


def read_config(arguments: list[str]) -> dict[str, Any]:
    """CONFIG, with BENCHMARK's values under --benchmark, and what the command line changes."""
    base = dict(CONFIG)
    if "--benchmark" in arguments:
        arguments = [a for a in arguments if a != "--benchmark"]
        base |= BENCHMARK
    config = parse_arguments(base, RULES, __doc__ or "", extra=EXTRA, arguments=arguments)
    if "all" in config["schedule"]:
        config["schedule"] = _one_stage_a_rank()
    for key in ("schedule", "num_microbatches"):
        config[key] = list(dict.fromkeys(config[key]))  # each case once
    if config["calibrate_on"] is None:
        config["calibrate_on"] = config["num_microbatches"][0]
    if config["calibrate_on"] not in config["num_microbatches"]:
        listed = ",".join(map(str, config["num_microbatches"]))
        raise UserError(
            f"calibrate_on={config['calibrate_on']} is not among num_microbatches={listed}",
            "name one that is run",
        )
    for key in EXTRA:
        if config[key] is not None and not Path(config[key]).absolute().parent.is_dir():
            raise UserError(f"--{key} {config[key]}: no such folder", "make it first")
    return config


def _one_stage_a_rank() -> list[str]:
    """Names of the schedules that can be run; sizes that all of them allow tell which."""
    built = {name: build_schedule(name, 4, 8) for name in SCHEDULES}
    return [n for n, s in built.items() if s.stages_per_rank == 1 and len(s.chains) == 1]


def main() -> NoReturn:
    arguments = sys.argv[1:]
    config = read_config(arguments)
    process = this_process(os.environ, config["num_stages"])
    if process is None:
        command = [sys.executable, os.path.abspath(__file__), *arguments]
        sys.exit(launch(command, config["num_stages"]))
    run_worker(lambda own: be_stage(config, arguments, own), process)


def be_stage(config: Mapping[str, Any], arguments: list[str], process: Process) -> None:
    """Run this process's stage; on rank 0 also print and write what came of it."""
    from pipedream.session import about, run_session  # torch is imported by the stages only

    outcome = run_session(
        config, process, keep_weights=config["weights"] is not None, say=_print_now
    )
    if outcome is None:
        return
    chosen = next(run for run in outcome.runs if run.num_microbatches == config["calibrate_on"])
    record = build_record(outcome.runs, chosen, about({k: config[k] for k in CONFIG}, arguments))
    print(render(record), flush=True)
    if config["record"] is not None:
        Path(config["record"]).write_text(json.dumps(record, indent=1) + "\n")
    if config["trace"] is not None:
        _write_trace(config["trace"], outcome.runs[-1], chosen)
    if config["weights"] is not None:
        _save_weights(config["weights"], outcome)


def _print_now(text: str) -> None:
    print(text, flush=True)


def _write_trace(path: str, run: MeasuredRun, chosen: MeasuredRun) -> None:
    timeline = None
    if can_predict(chosen.schedule, run.schedule):
        timeline = predict(run.schedule, calibrate(chosen.events, chosen.schedule)).timeline
    write_trace(
        path,
        predicted=timeline,
        measured=run.events,
        policy=run.policy,
        batch_size=run.num_microbatches,
        unit_s=1e-9,
    )


def _save_weights(path: str, outcome: Outcome) -> None:
    """{(schedule, m): [the weights of each stage, by name]}"""
    import torch

    saved = {
        (run.name, run.num_microbatches): weights
        for run, weights in zip(outcome.runs, outcome.weights, strict=True)
    }
    torch.save(saved, path)


def render(record: Mapping[str, Any]) -> str:
    """The table of a record: measured against predicted, one line a run."""
    found = record["calibration"]
    lines = [
        "",
        f"{'schedule':20}{'m':>4}  {'makespan, ms':^24}  {'bubble, %':^26}  versions  weights",
        f"{'':24}  {'measured':>8} {'simulated':>9} {'%':>5}  "
        f"{'measured':>8} {'simulated':>9} {'points':>7}",
    ]
    for case in record["cases"]:
        lines.append(_line(case))
    average = [
        f"stage {stage}: {forward:.2f} + {backward:.2f}"
        for stage, (forward, backward) in enumerate(
            zip(found["forward_ms"], found["backward_ms"], strict=True)
        )
    ]
    lines += [
        "",
        f"* the run that the durations are from ({found['schedule']}, "
        f"m={found['num_microbatches']}): forward + backward in ms, "
        f"{'; '.join(average)}; from stage to stage {found['communication_ms']:.2f} ms",
    ]
    impossible = sum(case["measured"]["causality_violations"] for case in record["cases"])
    lines += [
        "bubble: the share of all stages' time that is idle; utilisation is the rest",
        f"results received before they were sent: {impossible}",
    ]
    memory = [
        f"{case['schedule']} m={case['num_microbatches']}: "
        + ", ".join(f"{mib:.0f}" for mib in case["measured"]["peak_memory_mib"])
        for case in record["cases"]
        if case["measured"]["peak_memory_mib"] is not None
    ]
    if memory:
        lines += ["peak memory by stage, MiB", *(f"  {text}" for text in memory)]
    return "\n".join(lines)


def _line(case: Mapping[str, Any]) -> str:
    measured, predicted = case["measured"], case["predicted"]
    name = case["schedule"] + "*" * case["calibrated_on"]
    line = f"{name:20}{case['num_microbatches']:4d}  {measured['makespan_ms']:8.1f} "
    if predicted is None:
        line += f"{'-':>9} {'-':>5}  {100 * measured['bubble']:8.2f} {'-':>9} {'-':>7}"
    else:
        error = predicted["makespan_ms"] / measured["makespan_ms"] - 1
        points = 100 * (predicted["bubble"] - measured["bubble"])
        line += (
            f"{predicted['makespan_ms']:9.1f} {100 * error:+5.1f}  "
            f"{100 * measured['bubble']:8.2f} {100 * predicted['bubble']:9.2f} {points:+7.2f}"
        )
    versions = ",".join(map(str, measured["peak_versions"]))
    equal = {None: "not checked", True: "equal", False: "DIFFER"}[measured["weights_equal"]]
    return f"{line}  {versions:8}  {equal}"


if __name__ == "__main__":
    main_with_errors(main)
