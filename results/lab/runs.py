"""Shared code for programs that measure the runs in a plan and write their records to a folder.

After the deadline, the programs start no more runs and list the remaining ones. To continue, pass
the index of the first remaining run to `--first`."""

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed_training.models import find_model
from distributed_training.plan.layout import Batch
from distributed_training.plan.plan import Draft
from distributed_training.planner.make_plan import draft_plan
from distributed_training.planner.sort import layout_name
from distributed_training.predict.predict import Cluster, local_cluster
from distributed_training.records.display import short_name
from distributed_training.records.record import Record, write_json
from distributed_training.settings.config import KEYS
from distributed_training.settings.detect import detect_machine
from distributed_training.settings.files import load_json
from distributed_training.settings.keys import Parser
from distributed_training.settings.machine import Machine
from distributed_training.settings.request import build_config
from results.lab.corpus.records import write_records
from results.lab.pages.columns import table

Runs = dict[str, dict[str, Any]]  # name -> CONFIG values
Measured = tuple[str, dict[str, Any] | str]  # (name, record or the reason why there is none)


def read_plan(about: str, argv: Sequence[str] | None) -> tuple[argparse.Namespace, Any, Runs]:
    """Parse the command line of a program that measures a plan. Return the arguments, the plan, and
    its runs by name. A run's record can also serve as a plan that repeats the run."""
    parser = Parser(description=about)
    plan_help = "a JSON file of results/plans/, or the record of a run"
    parser.add_argument("plan", type=Path, help=plan_help)
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
    """Return the chosen runs from a plan, or the run from a record."""
    if "config_requested" in plan:
        values = to_current_keys(plan["config_requested"]) | plan.get("engine_options", {})
        batch = Batch(**plan["batch"])
        values |= {
            "resume": None,
            # In early records, the batch size is per replica. Now batch_size is per process.
            "batch_size": batch.global_batch_size // plan["world_size"],
            "grad_accum_steps": 1,
            "micro_batch_size": batch.micro_batch_size,
            "num_microbatches": batch.num_microbatches,
        }
        return {arguments.plan.stem: values}
    runs = plan["runs"]
    if isinstance(runs, list):
        runs = {f"{index} {run}": run for index, run in enumerate(runs)}
    chosen = list(runs.items())[arguments.first : arguments.last]
    return {name: {**plan["common"], **run} for name, run in chosen}


def print_layouts(arguments: argparse.Namespace) -> None:
    """Print the layout of each run in a plan. The layout is planned for the record's machine if the
    plan is a run's record, and for this machine otherwise."""
    plan = load_json(arguments.plan, "plan")
    with tempfile.TemporaryDirectory() as folder:
        for name, values in runs_of(plan, arguments).items():
            draft = draft_of(write_inputs(values, Path(folder, name)), cluster_of(plan))
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


def cluster_of(plan: Mapping[str, Any]) -> Cluster:
    """Return the cluster on which the run took place if the plan is a run's record. Otherwise,
    return this machine with the processes that the launcher starts."""
    if "machine" not in plan:
        count = int(os.environ.get("WORLD_SIZE", "1"))
        return local_cluster(detect_machine(), count, count)
    values = plan["machine"]
    machine = Machine(**values | {"compute_capability": tuple(values["compute_capability"])})
    return local_cluster(machine, plan["world_size"], plan["world_size"])


def draft_of(values: Mapping[str, Any], cluster: Cluster) -> Draft:
    return draft_plan(build_config(values), cluster)


def to_current_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a recorded CONFIG to the current keys. In old records, PowerSGD and topk-int8 are
    settings of dp, not of the strategy `compressed`."""
    values = {key: value for key, value in config.items() if key in KEYS}
    if values.get("gradient_compression") in ("powersgd", "topk-int8"):
        values["compression"] = values.pop("gradient_compression")
        values["strategy"] = "compressed"
        values |= {key: config[key] for key in ("compression_rank", "compression_k")}
    return values


def collect(
    arguments: argparse.Namespace, runs: Runs, measured: Iterable[Measured], columns: Sequence[str]
) -> None:
    """Print each run's result when the run ends, and write the run's record to `arguments.out`."""
    began = time.monotonic()
    not_started = list(runs)
    records = []
    for name, values in measured:
        not_started.remove(name)
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
    for name in not_started:
        print(f"not started: {name}", flush=True)


def record_path(record: Record, folder: Path) -> Path:
    """Return an unused path for a record. The file name consists of the model, layout, precision,
    micro-batch size and number of processes. If the name is in use, a number is added to it."""
    name = f"{short_name(record.config['model'])} {record.layout_name} {record.config['precision']}"
    name += f" b{record.batch.micro_batch_size} x{record.world_size}"
    name = name.replace(" ", "-")
    path = folder / f"{name}.json"
    numbers = itertools.count(2)
    while path.exists():
        path = folder / f"{name}-{next(numbers)}.json"
    return path
