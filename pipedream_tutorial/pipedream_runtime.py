"""Run pipelines with one process per stage and compare the times with predictions.

    python pipedream_runtime.py --num_stages 4
    torchrun --nproc_per_node=4 pipedream_runtime.py

Every schedule runs with every number of microbatches. One run measures the durations of the stages.
From these durations, the simulator predicts the other runs. With `schedule=search`, the program
uses the durations to look for the order of operations with the shortest makespan. The order of ZB-V
depends on durations, and is built here for equal durations F, I and W. For GPUs, use the settings
in results/lab/tutorial/benchmark.py.
"""

import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from pipedream.config import Rule, parse_arguments
from pipedream.errors import UserError, main_with_errors
from pipedream.runtime.launch import launch, run_worker, this_rank
from pipedream.schedules.orders import SCHEDULES, layers_per_stage, schedule_for_training

CONFIG: dict[str, Any] = {
    "num_stages": 4,  # p: number of processes, each with one stage of the model
    "num_microbatches": [4, 8],  # m: microbatches per batch; one run for each number
    "num_batches": 2,  # batches per run; schedules without a flush run them without a pause
    "schedule": ["gpipe", "1f1b", "pipedream"],  # one run for each; all: every trainable schedule
    "memory": None,  # schedule=search: maximum microbatches held by a rank, one run each; None: p
    "model": "mlp",  # mlp (small, for the CPU), gpt2-tiny or gpt2-medium (blocks only)
    "layers_per_stage": None,  # None: 2 for mlp, an equal share of the blocks for GPT-2 models
    "microbatch_size": None,  # samples or sequences per microbatch; None: 8 for mlp, 4 for GPT-2
    "dtype": None,  # None: float64 for mlp; for GPT-2, bfloat16 on a GPU, float32 on a CPU
    "device": "auto",  # auto: GPUs if there is one for each stage, otherwise the CPU
    "forward_ms": 10,  # on a CPU, each forward pass also sleeps this long to emulate a device
    "backward_ms": 20,  # sleep per whole backward pass, on a CPU; to never sleep, set both to 0
    "learning_rate": 0.1,  # learning rate of plain SGD
    "seed": 0,  # seed of weights and data
    "repeats": 1,  # timed runs of each case; the run with the median makespan is reported
    "warmups": 1,  # untimed runs of each case before the timed runs
    "receive_depth": 2,  # receives that are posted in advance
    "nccl_max_ctas": 4,  # multiprocessors that a pending receive may use; None: NCCL decides
    "calibrate_on": None,  # durations come from the first schedule's run with this m; None: first m
    "check_weights": True,  # also train in one process and compare the final weights bit for bit
    "timeout_s": 120,  # seconds that a stage waits for another stage before it gives up
    "record": None,  # JSON file for all measured and predicted numbers
    "weights": None,  # file for the final weights of every run, by torch.save
}

RULES: dict[str, Rule] = {
    "num_stages": Rule(kind=int, low=1, high=64),
    "num_microbatches": Rule(kind=int, is_list=True, low=1, high=4096),
    "num_batches": Rule(kind=int, low=1, high=1000),
    "schedule": Rule(
        kind=str, is_list=True, choices=("all", "search", *SCHEDULES), file_suffix=".csv"
    ),
    "memory": Rule(kind=int, is_list=True, nullable=True, low=1, high=4096),
    "model": Rule(kind=str, choices=("mlp", "gpt2-tiny", "gpt2-medium")),
    "layers_per_stage": Rule(kind=int, nullable=True, low=1, high=256),
    "microbatch_size": Rule(kind=int, nullable=True, low=1, high=512),
    "dtype": Rule(kind=str, nullable=True, choices=("float64", "float32", "bfloat16")),
    "device": Rule(kind=str, choices=("auto", "cpu", "cuda")),
    "forward_ms": Rule(kind=float, low=0, high=10_000),
    "backward_ms": Rule(kind=float, low=0, high=10_000),
    "learning_rate": Rule(kind=float, low=0, high=100),
    "seed": Rule(kind=int, low=0, high=10**6),
    "repeats": Rule(kind=int, low=1, high=1000),
    "warmups": Rule(kind=int, low=0, high=1000),
    "receive_depth": Rule(kind=int, low=0, high=64),
    "nccl_max_ctas": Rule(kind=int, nullable=True, low=1, high=32),
    "calibrate_on": Rule(kind=int, nullable=True),
    "check_weights": Rule(kind=bool),
    "timeout_s": Rule(kind=float, low=1, high=3600),
    "record": Rule(kind=str, nullable=True),
    "weights": Rule(kind=str, nullable=True),
}  # fmt: skip
OUTPUT_KEYS = ("record", "weights")


def read_config(arguments: list[str]) -> dict[str, Any]:
    """Apply the command-line changes to CONFIG, and return the result."""
    config = parse_arguments(CONFIG, RULES, str(__doc__), script=__file__, arguments=arguments)
    if "all" in config["schedule"]:
        config["schedule"] = _runnable_schedules(config)
    for key in ("schedule", "num_microbatches"):
        config[key] = list(dict.fromkeys(config[key]))  # remove duplicates
    if config["calibrate_on"] is None:
        config["calibrate_on"] = config["num_microbatches"][0]
    if config["calibrate_on"] not in config["num_microbatches"]:
        listed = ",".join(map(str, config["num_microbatches"]))
        raise UserError(
            f"calibrate_on={config['calibrate_on']} is not among num_microbatches={listed}",
            "choose one of these numbers",
        )
    paths = [config[key] for key in OUTPUT_KEYS if config[key] is not None]
    if len(set(map(os.path.realpath, paths))) < len(paths):
        raise UserError(
            f"two of {', '.join(OUTPUT_KEYS)} name the same file", "use a different file for each"
        )
    for key in OUTPUT_KEYS:
        if config[key] is not None:
            _check_writable(f"--{key} {config[key]}", Path(config[key]).absolute())
    return config


def _check_writable(option: str, path: Path) -> None:
    if path.is_dir():
        raise UserError(f"{option} is a folder", "add a file's name")
    if not path.parent.is_dir():
        raise UserError(f"{option}: no such folder", "create it first")
    # A record is written to a new file in the same folder, which then replaces a file at `path`.
    is_file_or_new = path.is_file() or not path.exists()
    if not is_file_or_new and option.startswith("--record"):
        raise UserError(f"{option} is not a file", "give one")
    if not os.access(path.resolve().parent if is_file_or_new else path, os.W_OK):
        raise UserError(f"{option} cannot be written", "give another path")


def _runnable_schedules(config: Mapping[str, Any]) -> list[str]:
    """Return the schedules that all the given sizes allow. Print the names of the other schedules
    to stderr."""
    p = config["num_stages"]
    fitting = []
    for name in SCHEDULES:
        try:
            for m in config["num_microbatches"]:
                schedule, _ = schedule_for_training(name, p, m, config["num_batches"])
                layers_per_stage(config["layers_per_stage"] or 0, schedule.stages_per_rank)
            fitting.append(name)
        except UserError as error:
            if os.environ.get("RANK", "0") == "0":  # print the note only once
                print(f"note: left out: {name}: {error}", file=sys.stderr)
    return fitting


def start(arguments: list[str]) -> NoReturn:
    """Start the stages, and exit. If torchrun started this process, run one stage in this process
    instead."""
    config = read_config(arguments)
    run = partial(run_stage, config, arguments)
    if this_rank(os.environ, config["num_stages"]) is not None:
        run_worker(run, config["num_stages"])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Import the stages' modules once, before they are forked.
    import pipedream.runtime.session  # noqa: F401

    sys.exit(launch(run, config["num_stages"]))


def run_stage(config: Mapping[str, Any], arguments: list[str], rank: int) -> None:
    """Run a stage. Rank 0 also prints and writes the results."""
    from pipedream.runtime.session import run_session  # imports torch

    run_session(config, " ".join(["python pipedream_runtime.py", *arguments]), rank)


if __name__ == "__main__":
    main_with_errors(lambda: start(sys.argv[1:]))
