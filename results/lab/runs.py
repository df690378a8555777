"""Shared code for programs that measure the runs in a plan.

After the deadline, the programs start no more runs and list the remaining ones. To continue, pass
the index of the first remaining run to `--first`."""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed_training.models import find_model
from distributed_training.planner.make_plan import draft_plan
from distributed_training.planner.sort import layout_name
from distributed_training.predict.predict import local_cluster
from distributed_training.settings.config import KEYS
from distributed_training.settings.detect import detect_machine
from distributed_training.settings.files import load_json
from distributed_training.settings.keys import Parser
from distributed_training.settings.request import build_config
from results.lab.corpus.records import write_records

Runs = dict[str, dict[str, Any]]  # name -> CONFIG values


def read_plan(about: str, argv: Sequence[str] | None) -> tuple[argparse.Namespace, Any, Runs]:
    """Parse the command line of a program that measures a plan. Return the arguments, the plan, and
    its runs by name."""
    parser = Parser(description=about)
    parser.add_argument("plan", type=Path, help="a JSON file of results/plans/")
    parser.add_argument("out", type=Path, help="a folder for the records")
    parser.add_argument("--deadline_s", type=float, default=float("inf"))
    parser.add_argument("--first", type=int, default=0, help="index of the first run to start")
    parser.add_argument("--last", type=int, help="index after the last run to start")
    parser.add_argument("--git_commit", help="commit hash, for checkouts without a .git folder")
    parser.add_argument("--dry-run", action="store_true", help="only print the runs' layouts")
    arguments = parser.parse_args(argv)
    if arguments.dry_run:
        print_layouts(arguments)
        sys.exit(0)
    arguments.out.mkdir(parents=True, exist_ok=True)
    plan = load_json(arguments.plan, "plan")
    return arguments, plan, runs_of(plan, arguments)


def runs_of(plan: Mapping[str, Any], arguments: argparse.Namespace) -> Runs:
    """Return the chosen runs from a plan."""
    runs = plan["runs"]
    if isinstance(runs, list):
        runs = {f"{index} {run}": run for index, run in enumerate(runs)}
    chosen = list(runs.items())[arguments.first : arguments.last]
    return {name: {**plan["common"], **run} for name, run in chosen}


def print_layouts(arguments: argparse.Namespace) -> None:
    """Print the layout that each run in a plan has on this machine, with the processes that the
    launcher starts."""
    plan = load_json(arguments.plan, "plan")
    count = int(os.environ.get("WORLD_SIZE", "1"))
    cluster = local_cluster(detect_machine(), count, count)
    with tempfile.TemporaryDirectory() as folder:
        for name, values in runs_of(plan, arguments).items():
            draft = draft_plan(build_config(write_inputs(values, Path(folder, name))), cluster)
            print(f"{name}: {layout_name(draft)}, {draft.batch.describe()}")


def write_inputs(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a run's values after writing the inputs that CONFIG does not know to `folder`: a
    config.json given as `model`; the config.json of a model with fewer `layers`; and "functions" as
    `dataset`, one record per function of Python's standard library."""
    values = dict(values)
    document = values["model"]
    if layers := values.pop("layers", None):
        spec = find_model(document)
        document = {**spec.code.to_config(spec.size, 0), "num_hidden_layers": layers}
    folder.mkdir(parents=True)
    if isinstance(document, dict):
        (folder / "config.json").write_text(json.dumps(document))
        values["model"] = str(folder)
    if values.get("dataset") == "functions":
        values["dataset"] = str(folder / "functions.jsonl")
        write_records(folder / "functions.jsonl")
    return values


def to_current_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a recorded CONFIG to the current keys. In old records, PowerSGD and topk-int8 are
    settings of dp, not of the strategy `compressed`."""
    values = {key: value for key, value in config.items() if key in KEYS}
    if values.get("gradient_compression") in ("powersgd", "topk-int8"):
        values["compression"] = values.pop("gradient_compression")
        values["strategy"] = "compressed"
        values |= {key: config[key] for key in ("compression_rank", "compression_k")}
    return values
