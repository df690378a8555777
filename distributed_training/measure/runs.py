"""Run a list of trainings one after the other and collect their records in a folder.

    python real_model_example.py measure runs results/plans/h200-x1.json results/records/h200-x1

A plan is JSON: {"num_gpus": N, "common": {CONFIG keys}, "runs": [{CONFIG keys}, ...]}. Every run is
the command a user would type; what it prints goes to log.txt in the folder. Runs that would start
after the deadline are listed instead; `--first` goes on with them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from distributed_training.records.record import RECORD_FILE, Record, write_json
from distributed_training.records.tables import layout_words, table
from distributed_training.settings.files import ROOT

COLUMNS = (
    "strategy", "processes", "batch", "precision", "tokens/s", "ms a step", "timed steps", "MFU",
    "peak GPU memory", "peak host memory", "disk a step", "perplexity", "steps", "status",
)  # fmt: skip
OUTPUT_DIR = Path("/tmp/plan-runs")
Runs = dict[str, dict[str, Any]]  # name -> CONFIG values
Measured = tuple[str, dict[str, Any] | str]  # name, and the record or why there is none


def read_plan(about: str, argv: Sequence[str] | None) -> tuple[argparse.Namespace, Any, Runs]:
    """The command line of what goes through a plan, the plan, and its runs by name."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("plan", type=Path, help="a JSON file of results/plans/, for example")
    parser.add_argument("out", type=Path, help="a folder for the records")
    parser.add_argument("--deadline_s", type=float, default=float("inf"))
    parser.add_argument("--first", type=int, default=0, help="skip the runs before this one")
    parser.add_argument("--git_commit", help="of this tree, where it has no .git")
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    plan = json.loads(arguments.plan.read_text())
    runs = list(enumerate(plan["runs"]))[arguments.first :]
    return arguments, plan, {f"{i} {run}": {**plan["common"], **run} for i, run in runs}


def collect(
    arguments: argparse.Namespace, runs: Runs, measured: Iterable[Measured], columns: Sequence[str]
) -> None:
    """Print what came of each run as it ends, and write its record into the folder."""
    began, left, records = time.monotonic(), list(runs), []
    for name, values in measured:
        left.remove(name)
        print(f"[{time.monotonic() - began:5.0f} s] {name}", flush=True)
        if isinstance(values, str):
            print(values, flush=True)
            continue
        values["git_commit"] = values["git_commit"] or arguments.git_commit
        record = Record.model_validate(values)
        records.append(record)
        print(table([record], columns).splitlines()[-1], flush=True)
        write_json(arguments.out / _free_name(record, arguments.out), values)
    print(table(records, columns), flush=True)
    for name in left:
        print(f"not started: {name}", flush=True)


def _free_name(record: Record, folder: Path) -> str:
    """What distinguishes the record; the same run again gets a number."""
    model, precision = record.config["model"], record.config["precision"]
    words = [model, record.strategy["name"], *layout_words(record), precision]
    name = "-".join([*words, f"b{record.batch.micro_batch_size}", f"x{record.world_size}"])
    names = itertools.chain([name], (f"{name}-{count}" for count in itertools.count(2)))
    return next(f"{name}.json" for name in names if not (folder / f"{name}.json").exists())


def run_each(runs: Runs, num_gpus: int, log: Path, deadline_s: float) -> Iterator[Measured]:
    """Train as each run says, in processes of its own; what they print is added to `log`."""
    began = time.monotonic()
    for name, values in runs.items():
        if time.monotonic() - began > deadline_s:
            return
        command = [sys.executable, str(ROOT / "real_model_example.py"), f"--num_gpus={num_gpus}"]
        settings = {**values, "output_dir": OUTPUT_DIR}
        command += ["--set", *(f"{key}={value}" for key, value in settings.items())]
        before = set(OUTPUT_DIR.glob(f"*/{RECORD_FILE}"))
        pipes: Any = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True, **pipes)
        with open(log, "a") as file:
            file.write(f"\n$ {' '.join(command)}\n{result.stdout}")
        if result.returncode != 0:
            print(f"exit code {result.returncode}\n{result.stdout[-1500:]}")
        new = set(OUTPUT_DIR.glob(f"*/{RECORD_FILE}")) - before
        yield name, json.loads(new.pop().read_text()) if new else "it left no record"


def main(argv: Sequence[str] | None = None) -> int:
    arguments, plan, runs = read_plan("Run a list of trainings, collect their records.", argv)
    measured = run_each(runs, plan["num_gpus"], arguments.out / "log.txt", arguments.deadline_s)
    collect(arguments, runs, measured, COLUMNS)
    return 0
