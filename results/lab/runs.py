"""What programs share that go through a plan of runs and collect records in a folder.

Runs that would start after the deadline are listed instead; `--first` goes on with them.
"""

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from distributed_training.records.record import Record, write_json
from distributed_training.settings.keys import Parser
from distributed_training.tools.compare import record_path
from results.lab.pages.columns import table

Runs = dict[str, dict[str, Any]]  # name -> CONFIG values
Measured = tuple[str, dict[str, Any] | str]  # name, and the record or why there is none


def read_plan(about: str, argv: Sequence[str] | None) -> tuple[argparse.Namespace, Any, Runs]:
    """The command line of what goes through a plan, the plan, and its runs by name."""
    parser = Parser(description=about)
    parser.add_argument("plan", type=Path, help="a JSON file of results/plans/, for example")
    parser.add_argument("out", type=Path, help="a folder for the records")
    parser.add_argument("--deadline_s", type=float, default=float("inf"))
    parser.add_argument("--first", type=int, default=0, help="skip the runs before this one")
    parser.add_argument("--last", type=int, help="skip the runs after so many")
    parser.add_argument("--git_commit", help="of this tree, where its .git does not say so")
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    plan = json.loads(arguments.plan.read_text())
    runs = plan["runs"]
    if isinstance(runs, list):
        runs = {f"{place} {run}": run for place, run in enumerate(runs)}
    chosen = list(runs.items())[arguments.first : arguments.last]
    return arguments, plan, {name: {**plan["common"], **run} for name, run in chosen}


def collect(
    arguments: argparse.Namespace, runs: Runs, measured: Iterable[Measured], columns: Sequence[str]
) -> None:
    """Print what came of each run as it ends, and write its record into the folder."""
    began = time.monotonic()
    left = list(runs)
    records = []
    for name, values in measured:
        left.remove(name)
        print(f"[{time.monotonic() - began:5.0f} s] {name}", flush=True)
        if isinstance(values, str):
            print(values, flush=True)
            continue
        values["git_commit"] = arguments.git_commit or values["git_commit"]
        record = Record.model_validate(values)
        records.append(record)
        print(table([record], columns).splitlines()[-1], flush=True)
        write_json(record_path(record, arguments.out), values)
    print(table(records, columns), flush=True)
    for name in left:
        print(f"not started: {name}", flush=True)
