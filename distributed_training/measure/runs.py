"""Run a list of trainings one after the other and bundle their records.

    python real_model_example.py measure runs results/plans/h200-x1.json OUT.json
    python real_model_example.py measure runs --unpack OUT.json FOLDER

A plan is JSON: {"num_gpus": N, "common": {CONFIG keys}, "runs": [{CONFIG keys}, ...]}. Every run is
the command a user would type; what it prints goes to OUT.log. Runs that would start after the
deadline are listed instead; `--first` goes on with them, in the same bundle.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from distributed_training.records.record import RECORD_FILE, write_json
from distributed_training.records.schema import Record
from distributed_training.records.tables import layout_words, table
from distributed_training.settings.files import ROOT

COLUMNS = (
    "strategy", "processes", "batch", "precision", "tokens/s", "ms a step", "timed steps", "MFU",
    "peak GPU memory", "peak host memory", "disk a step", "perplexity", "steps", "status",
)  # fmt: skip
OUTPUT_DIR = Path("/tmp/plan-runs")
# Name of a run, and its record or why there is none.
Measured = tuple[str, dict[str, Any] | str]


def plan_parser(about: str | None) -> argparse.ArgumentParser:
    """The arguments of what goes through a plan of runs."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("plan", type=Path, help="a JSON file of results/plans/, for example")
    parser.add_argument("out", type=Path, help="the records of all runs, one JSON file")
    parser.add_argument("--deadline_s", type=float, default=float("inf"))
    parser.add_argument("--first", type=int, default=0, help="skip the runs before this one")
    parser.add_argument("--git_commit", help="of this tree, where it has no .git")
    return parser


def name_runs(plan: dict[str, Any], first: int) -> dict[str, dict[str, Any]]:
    """Name -> CONFIG values of the plan's runs from number `first` on."""
    runs = list(enumerate(plan["runs"]))[first:]
    return {f"{index} {run}": {**plan["common"], **run} for index, run in runs}


def bundle(
    arguments: argparse.Namespace,
    names: Iterable[str],
    measured: Iterable[Measured],
    columns: Sequence[str],
) -> None:
    """Print what came of each run as it ends, and write all records after each."""
    began, left, records = time.monotonic(), list(names), []
    if arguments.first and arguments.out.exists():
        records = json.loads(arguments.out.read_text())["records"]
    for name, record in measured:
        left.remove(name)
        print(f"[{time.monotonic() - began:5.0f} s] {name}", flush=True)
        if isinstance(record, str):
            print(record, flush=True)
            continue
        record["git_commit"] = record["git_commit"] or arguments.git_commit
        records.append(record)
        print(table([Record.model_validate(record)], columns).splitlines()[-1], flush=True)
        write_json(arguments.out, {"records": records})
    print(table([Record.model_validate(record) for record in records], columns), flush=True)
    for name in left:
        print(f"not started: {name}", flush=True)


def run_each(
    runs: dict[str, dict[str, Any]], num_gpus: int, log: Path, deadline_s: float
) -> Iterator[Measured]:
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


def unpack(bundled: Path, folder: Path) -> None:
    """One file a record, named by what distinguishes it; a run that the bundle holds again gets a
    number. Files of earlier bundles are replaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    seen: Counter[str] = Counter()
    for values in json.loads(bundled.read_text())["records"]:
        record = Record.model_validate(values)
        model, precision = record.config["model"], record.config["precision"]
        words = [model, record.strategy.name, *layout_words(record), precision]
        name = "-".join([*words, f"b{record.batch.micro_batch_size}", f"x{record.world_size}"])
        seen[name] += 1
        again = f"-{seen[name]}" if seen[name] > 1 else ""
        write_json(folder / f"{name}{again}.json", values)


def main(argv: Sequence[str] | None = None) -> int:
    parser = plan_parser("Run a list of trainings, bundle their records.")
    parser.add_argument("--unpack", action="store_true", help="PLAN is a bundle, OUT a folder")
    arguments = parser.parse_args(argv)
    if arguments.unpack:
        unpack(arguments.plan, arguments.out)
        return 0
    plan = json.loads(arguments.plan.read_text())
    runs = name_runs(plan, arguments.first)
    log = arguments.out.with_suffix(".log")
    measured = run_each(runs, plan["num_gpus"], log, arguments.deadline_s)
    bundle(arguments, runs, measured, COLUMNS)
    return 0
