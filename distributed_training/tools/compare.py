"""Train the same model on the same data under several strategies, and compare the runs.

A plan is a JSON file with this form:

    {"num_gpus": N, "common": {CONFIG keys}, "runs": [{CONFIG keys}, ...]}

Each run is started with the command that a user would type. All runs append their output to
log.txt, and their records are in runs/. If you start the plan again, only the runs without a
finished record are trained. This process does not import torch."""

import argparse
import dataclasses
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field
from pydantic_core import to_json

from distributed_training.records import record as records
from distributed_training.records import report
from distributed_training.records.display import fold, short_path
from distributed_training.records.results import NOT_RUN, LayoutRow, differing_keys
from distributed_training.settings.config import AUTO, CAPPED_NUM_SAMPLES, KEYS, Request
from distributed_training.settings.detect import detect_machine
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import load_json, parse_as, plural
from distributed_training.settings.strategies import strategy_options
from distributed_training.start.local import requested_processes
from distributed_training.supervise.process import end_with_parent, handle_signals

# Defaults that switch off output that a comparison does not need. Typed keys and the plan override
# them.
QUIET_DEFAULTS = {"checkpoint_every": 0, "keep_best": False, "export": False, "generate": None}
# Keys that define the work. The batch size is part of the work, although its keys are not marked as
# such.
WORK_KEYS = {"batch_size", "grad_accum_steps", *(name for name, key in KEYS.items() if key.work)}
RECORD_PATTERN = f"[!l]*/{records.RECORD_FILE}"  # [!l] skips the link "latest"
Values = dict[str, Any]
Build = Callable[[Values], Request]  # applies values to CONFIG, as the command line does
Differences = dict[str, dict[str, float]]  # quantity -> step or tensor -> relative difference


class ComparisonPlan(BaseModel):
    """Contents of a plan's JSON file. Unknown fields are ignored, so a plan can contain notes for
    readers."""

    num_gpus: int | str = "all"
    common: Values = {}
    runs: list[Values] = Field(min_length=1)


@dataclasses.dataclass(kw_only=True)
class Run(LayoutRow):
    """One requested training run and its result."""

    name: str = ""  # strategy and the keys that the plan sets for this run
    values: Values  # keys that override CONFIG, including strategy
    command: list[str]  # command without these values
    num_processes: int
    config: Request | None = None  # None if CONFIG was rejected
    seconds: float = 0.0
    exit_code: int = 0  # of the training process
    verdict: str = ""  # of `parity`; "" until the run has a result
    differences: Differences = dataclasses.field(default_factory=dict)  # of `parity`


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `compare` and `parity` that name the runs and the folder for their
    records."""
    add = parser.add_argument
    add(
        "plan",
        nargs="?",
        metavar="PLAN.json",
        help="JSON file that lists the runs. results/plans/ has examples",
    )
    add("--strategies", metavar="A,B", help="strategies to run instead of a plan (parity: all)")
    add(
        "--out",
        metavar="FOLDER",
        help="folder for the records and the results (default: a subfolder of output_dir)",
    )


def run(arguments: argparse.Namespace, build: Build, script: Path) -> int:
    """Train the runs that have no record, then write the page. Return the exit code: 1 if no run
    succeeded, 130 if the user interrupted the runs, otherwise 0."""
    runs, out = build_runs(arguments, build, script, QUIET_DEFAULTS)
    attach_finished_records(runs, out)
    num_finished = count_runs(runs, "ok")
    processes = plural(runs[0].num_processes, "process")
    summary = f"The comparison has {plural(len(runs), 'run')} with {processes} each. "
    summary += f"Its folder is {short_path(out)}."
    if num_finished:
        summary += f" {plural(num_finished, 'run')} already finished."
    print(summary, flush=True)
    if arguments.dry_run:
        print_settings(runs)
        return 0
    code = 0
    try:
        train_each(runs, out, lambda run: run.why or "ok")
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
        print(f"\nInterrupted with {plural(count_runs(runs, NOT_RUN), 'run')} remaining.")
        print("Run the same command again to continue.")
    write_page(runs, out)
    if code == 0 and count_runs(runs, "ok") == 0:
        code = 1
    return code


def count_runs(runs: Sequence[Run], status: str) -> int:
    return sum(run.status == status for run in runs)


def build_runs(
    arguments: argparse.Namespace, build: Build, script: Path, defaults: Values
) -> tuple[list[Run], Path]:
    """Return the requested runs and the folder for their records. Values from the plan and from the
    command line override `defaults`. Raises UserError if CONFIG rejects every run."""
    if bool(arguments.plan) == bool(arguments.strategies) or "strategy" in arguments.overrides:
        what = "compare needs either a plan or --strategies, and no --strategy"
        raise UserError(what, fix="write --strategies dp,fsdp or the path of a PLAN.json")
    if arguments.plan:
        file = Path(arguments.plan).expanduser()
        fix = 'write {"num_gpus": N, "common": {...}, "runs": [{...}, ...]}'
        document = load_json(file, "plan")
        plan = parse_as(ComparisonPlan, document, f"{file} is not a plan of runs", fix)
        name = file.stem
    else:
        strategies = re.split(r"\s*,\s*", arguments.strategies.strip())
        plan = ComparisonPlan(runs=[{"strategy": strategy} for strategy in strategies])
        name = "-".join(strategies)
    typed_overrides = arguments.overrides
    has_num_samples = "num_samples" in plan.common or "num_samples" in typed_overrides
    if not has_num_samples and not build({}).is_set("num_samples"):
        defaults = {**defaults, "num_samples": CAPPED_NUM_SAMPLES}
        text = f"By default, an epoch has at most {CAPPED_NUM_SAMPLES:,} samples"
        print(f"{text}. To train on all samples, add --num_samples -1.")
    layouts = [defaults | plan.common | values for values in plan.runs]
    engine_keys = [
        {*strategy_options(values.get("strategy", AUTO)).model_fields} for values in layouts
    ]
    num_gpus = str(arguments.num_gpus or plan.num_gpus)
    processes = requested_processes(num_gpus, detect_machine(), {})
    for values, own_keys in zip(layouts, engine_keys, strict=True):
        # An option of one strategy may be unknown to the other strategies.
        foreign_keys = set().union(*engine_keys) - own_keys
        own_overrides = typed_overrides.keys() - foreign_keys
        values |= {key: typed_overrides[key] for key in own_overrides}
    command = [sys.executable, str(script)]
    if arguments.preset:
        command.append(f"--preset={arguments.preset}")
    if arguments.force:
        command.append("--force")
    runs = [
        build_run(values, own_values, build, command, processes)
        for values, own_values in zip(layouts, plan.runs, strict=True)
    ]
    configs = [run.config for run in runs if run.config is not None]
    if not configs:
        raise UserError(runs[0].why)
    if arguments.out:
        return runs, Path(arguments.out).expanduser()
    return runs, Path(configs[0].output_dir) / f"compare-{name}-x{processes}"


def build_run(
    values: Values, own_keys: Iterable[str], build: Build, command: list[str], num_processes: int
) -> Run:
    """Return a run with these values. Its name contains the values of `own_keys`. If CONFIG rejects
    the values, the run's `why` contains the reason."""
    run = Run(values={"strategy": "?", **values}, command=command, num_processes=num_processes)
    try:
        config = build(values)
        if config.batch_size == AUTO:
            what = "compare needs a fixed batch_size, because each strategy would choose its own"
            raise UserError(what, fix="add --batch_size 8")
        run.config = config
        run.values["strategy"] = config.strategy
    except UserError as error:
        run.why = str(error)
    settings = [f"{key}={run.values[key]}" for key in own_keys if key != "strategy"]
    run.name = " ".join([run.values["strategy"], *settings])
    return run


def print_settings(runs: Sequence[Run]) -> None:
    """For a dry run, print the settings of each run that remains to be trained."""
    for run in runs:
        if run.status == NOT_RUN:
            print(f"  {' '.join(format_options(run.values))}")


def format_options(values: Values) -> list[str]:
    """Return `values` as options for the command line."""
    return [f"--{key}={value}" for key, value in values.items()]


def attach_finished_records(runs: Sequence[Run], out: Path) -> None:
    """For each run, reuse a finished record in `out` that has the same CONFIG and the same number
    of processes."""
    folder = out / "runs"
    finished = report.find_records([folder]) if folder.is_dir() else []
    for run in runs:
        if run.config is not None:
            requested = json.loads(to_json(run.config.to_key_values()))
            for record in finished:
                # Runs that differ only in output_dir count as equal.
                differing = differing_keys([record.config_requested, requested])
                is_same = {*differing} <= {"output_dir"}
                if is_same and record.world_size == run.num_processes and record.status == "ok":
                    run.record = record


def train_each(runs: Sequence[Run], out: Path, conclude: Callable[[Run], str]) -> None:
    """Train the remaining runs one after another, and print what `conclude` returns for each.
    Raises KeyboardInterrupt also on SIGTERM."""
    out.mkdir(parents=True, exist_ok=True)
    print(f"The output of the runs is in {short_path(out)}/log.txt.", flush=True)
    with handle_signals({signal.SIGTERM: signal.default_int_handler}):
        for number, run in enumerate(runs, 1):
            if run.status == "ok":
                continue
            prefix = f"{number:>3}/{len(runs)}  "
            if run.status == NOT_RUN:
                print(f"{prefix}{run.name} ...", flush=True)
                start = time.monotonic()
                train(run, out)
                run.seconds = time.monotonic() - start
            line = f"{prefix}{run.name}: {conclude(run)}"
            print(fold(line, len(prefix)), flush=True)


def train(run: Run, out: Path) -> None:
    """Start the run in a new process session, and store its record or error in `run`. On
    KeyboardInterrupt, interrupt the training process, wait until it ends, and raise."""
    folder = out / "runs"
    old_records = set(folder.glob(RECORD_PATTERN))
    options = format_options(run.values | {"output_dir": folder})
    command = [*run.command, f"--num_gpus={run.num_processes}", *options]
    with open(out / "log.txt", "a+", encoding="utf-8", errors="replace") as log:
        log.write(f"\n$ {' '.join(command)}\n")
        log.flush()
        start_of_run = log.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=end_with_parent,  # even if this process is killed
        )
        try:
            run.exit_code = process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
        log.seek(start_of_run)
        # Move the command that follows an error message to the same line.
        text = re.sub(r"(?m)^(error: .*\brun:)\n ", r"\1", log.read())
    # Prefer a line that says why the run did not start over the last line.
    messages = re.findall(r"(?m)^\s*error: (.*\S)", text) or text.strip().split("\n")
    # A lost connection is the consequence of another rank's error, which may come before it.
    causes = [message for message in messages if records.LOST_PEER not in message]
    last_message = (causes or messages)[-1].strip() or f"exit code {run.exit_code}"
    for path in {*folder.glob(RECORD_PATTERN)} - old_records:
        run.record = records.load_record(path)
    if run.record is None:
        run.why = last_message
    elif run.record.status != "ok":
        run.why = f"{run.record.status}: {run.record.error or last_message}"


def write_page(runs: Sequence[Run], out: Path) -> None:
    """Print the tables, and write them to a file."""
    heading = (
        f"{count_runs(runs, 'ok')} of {plural(len(runs), 'run')} finished. The runs were executed "
        "one after another, each in new processes."
    )
    text = report.render(heading, runs)
    (out / "compare.txt").write_text(f"{text}\n", encoding="utf-8")
    print(f"\n{text}")
