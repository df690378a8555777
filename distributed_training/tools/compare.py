"""The same work under several strategies, one after the other, on one page.

A plan is JSON: {"num_gpus": N, "common": {CONFIG keys}, "runs": [{CONFIG keys}, ...]}. Every run is
the command that a user would type; what it prints goes to log.txt. Records lie in the folder as
soon as they are there: started again, only runs without one are done. No torch in this process."""

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field
from pydantic_core import to_json
from tqdm import tqdm

from distributed_training.planner.data import AUTO_SAMPLES, peek_data
from distributed_training.planner.make_plan import make_plan
from distributed_training.predict.predict import this_machine
from distributed_training.records import record as records
from distributed_training.records import report
from distributed_training.records.display import WIDTH, duration, last_part, short_path
from distributed_training.records.tables import MEASURED, NOTHING, Comparison, Layout, differing
from distributed_training.settings.config import AUTO, KEYS, Request
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import (
    expand_home,
    load_json,
    parse_as,
    plural,
    require_writable,
)
from distributed_training.settings.keys import at_least
from distributed_training.settings.machine import detect_machine
from distributed_training.settings.strategies import strategy_options
from distributed_training.start.launch import requested_processes
from distributed_training.start.ranks import beside
from distributed_training.supervise.process import handling

# Not part of what is compared; a key that is typed or in the plan stays as it is.
QUIETLY = {"checkpoint_every": 0, "export": False, "generate": None}
# What is to be done; the step's size is work, though not marked as such.
WORK = {"batch_size", "grad_accum_steps", *(name for name, key in KEYS.items() if key.work)}
RECORDS = f"[!l]*/{records.RECORD_FILE}"  # not through the link "latest"
# To start a run and to end it, roughly (results/records/first-minute).
START_S = {"cpu": 8.0, "cuda": 15.0}
OTHER_OUT = "name another folder with --out"
PATIENCE_S = 30.0  # for a run that was told to stop
SAID = ("tokens/s", "peak GPU memory", "peak RAM", "validation loss")  # of each run
Build = Callable[[Sequence[str]], Request]  # "key=value" texts -> CONFIG with them
Values = dict[str, Any]


class RunPlan(BaseModel):
    """A plan's JSON; what else is in it is for its readers."""

    num_gpus: int | str = "all"
    common: Values = {}
    runs: list[Values] = Field(min_length=1)


@dataclass(kw_only=True, slots=True)
class Run:
    """One training that is wanted, and what came of it."""

    values: Values  # CONFIG keys over CONFIG, strategy and seed among them
    command: list[str]  # but for the values
    num_processes: int
    work: str = ""  # what it is to do, in words, and how: strategy and what tells it from others
    name: str = ""
    config: Request | None = None  # None: refused before it was started
    record: records.Record | None = None  # None: not started
    why: str = ""  # it did not start, or end well
    seconds: float = 0.0

    @property
    def status(self) -> str:
        if self.record is None:
            return "not run" if self.why else "left"
        return "failed" if self.why else "ok"


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `compare` takes besides CONFIG's keys."""
    add = parser.add_argument
    add("plan", nargs="?", metavar="PLAN.json", help="runs, as in results/plans/")
    add("--strategies", metavar="A,B", help="without a plan: strategies, separated by commas")
    seeds = "runs of each, with seed, seed + 1, ..."
    add("--seeds", type=at_least(1), default=1, metavar="N", help=seeds)
    add("--out", metavar="FOLDER", help="for records and page; default: in output_dir")
    add("--git_commit", help=argparse.SUPPRESS)  # of this tree, where it has no .git


def run(arguments: argparse.Namespace, build: Build, script: Path) -> int:
    """Do what is missing, then write the page; 1 where no run finished, 130 where interrupted."""
    runs, out = plan_runs(arguments, build, script, QUIETLY)
    require_writable(out, OTHER_OUT, "compare.md", "compare.html", "log.txt")
    take_finished(runs, out)
    kept = count(runs, "ok")
    processes = plural(runs[0].num_processes, "process")
    about = f"{plural(len(runs), 'run')} with {processes} each, in {short_path(out)}"
    left = [(run.config, run.num_processes) for run in runs if run.config and run.status == "left"]
    if kept:
        about += f"; {kept} are there already"
    if left:
        on_gpus = detect_machine().num_gpus > 0
        seconds = predicted_s(left, run_s=START_S["cuda" if on_gpus else "cpu"])
        about += f"; {len(left)} to do, {duration(seconds)}"
    print(about, flush=True)
    if arguments.dry_run:
        print_settings(runs)
        return 0
    code = 0
    try:
        train_each(runs, out, lambda run: keep(run, out, arguments.git_commit))
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
        print(f"interrupted with {count(runs, 'left')} to go; the same command goes on with them")
    write_page(runs, out)
    return code or int(count(runs, "ok") == 0)


def count(runs: Sequence[Run], status: str) -> int:
    return sum(run.status == status for run in runs)


def predicted_s(runs: Sequence[tuple[Request, int]], run_s: float) -> float | None:
    """The seconds that `plan` predicts for all runs, (CONFIG, number of processes) each, and
    `run_s` per run for starting and ending; None if that is not known for one of them."""

    def predict() -> str:  # in another process: tokenizers begin threads
        machine = detect_machine()
        found: list[float | None] = []
        for config, count in runs:
            try:
                plan = make_plan(config, this_machine(machine, count, count), peek_data)
            except UserError:  # it says so when its turn comes
                found.append(0.0)
                continue
            steps = plan.num_steps
            wanted = AUTO_SAMPLES if config.num_samples == AUTO else int(config.num_samples)
            if steps is None and wanted > 0:  # at most
                steps = config.epochs * -(-wanted // plan.batch.global_batch_size)
            if config.max_steps > 0:
                steps = config.max_steps
            step_s = (plan.prediction or {}).get("step_time_s")
            found.append(run_s + steps * step_s if steps and step_s else None)
        return json.dumps(found)

    seconds = json.loads(beside(predict)())
    return None if None in seconds else sum(seconds)


def plan_runs(
    arguments: argparse.Namespace, build: Build, script: Path, always: Values
) -> tuple[list[Run], Path]:
    """(the runs that are wanted, with `always` where nothing else is typed or in the plan; where
    they go). Raises UserError where nothing can be compared."""
    if (arguments.plan is None) == (arguments.strategies is None):
        what = "give either a plan or --strategies"
        raise UserError(what, fix="type --strategies dp,fsdp or PLAN.json")
    if arguments.plan is not None:
        file = Path(expand_home("the plan", arguments.plan))
        fix = 'write {"num_gpus": N, "common": {...}, "runs": [{...}, ...]}'
        plan = parse_as(RunPlan, load_json(file, "plan"), f"{file} is not a plan of runs", fix)
        name = file.stem
    else:
        words = [word.strip() for word in arguments.strategies.split(",")]
        plan = RunPlan(runs=[{"strategy": word} for word in words])
        name = "-".join(words)
    layouts = [always | by_name(plan.common) | by_name(values) for values in plan.runs]
    typed = by_name(dict(text.partition("=")[::2] for text in arguments.overrides))
    own = [set(strategy_options(each.get("strategy", AUTO)).model_fields) for each in layouts]
    for layout, keys in zip(layouts, own, strict=True):
        foreign = set().union(*own) - keys  # that only the engines of other strategies have
        layout.update((key, value) for key, value in typed.items() if key not in foreign)
    processes = requested_processes(str(arguments.num_gpus or plan.num_gpus), detect_machine(), {})
    command = [sys.executable, str(script), f"--max_restarts={arguments.max_restarts}"]
    if arguments.preset:
        command.append(f"--preset={arguments.preset}")
    if arguments.force:
        command.append("--force")
    seeds = range(arguments.seeds)
    runs = [plan_run(each, more, build, command, processes) for more in seeds for each in layouts]
    telling = {*differing([run.values for run in runs])} - {"strategy", "seed", *WORK}
    for run in runs:
        run.work = ", ".join(f"{k} {v}" for k, v in run.values.items() if k in WORK - {"seed"})
        words = [f"{key}={value}" for key, value in run.values.items() if key in telling]
        run.name = " ".join([run.values["strategy"], *words])
    configs = [run.config for run in runs if run.config is not None]
    if not configs:
        raise UserError(runs[0].why)
    if arguments.out:
        return runs, Path(expand_home("--out", arguments.out))
    return runs, Path(configs[0].output_dir) / f"compare-{name}-x{processes}"


def by_name(values: Values) -> Values:
    """The values under their keys' own names."""
    names = {alias: key.name for key in KEYS.values() for alias in key.aliases}
    return {names.get(name.strip(), name.strip()): value for name, value in values.items()}


def texts(values: Values) -> list[str]:
    """As the command line takes them."""
    return [f"{key}={value}" for key, value in values.items()]


def plan_run(
    values: Values, more: int, build: Build, command: list[str], num_processes: int
) -> Run:
    """A run of these values with the seed that CONFIG gives it and `more`."""
    asked = {"strategy": "?", **values, "seed": more}
    run = Run(values=asked, command=command, num_processes=num_processes)
    try:
        config = build(texts(values))
        if config.batch_size == AUTO:
            what = "compare needs a batch_size: each strategy would choose its own"
            raise UserError(what, fix="add --batch_size 8")
        run.config = config.model_copy(update={"seed": config.seed + more})
        run.values |= {"strategy": config.strategy, "seed": run.config.seed}
    except UserError as error:
        run.why = str(error)
    return run


def print_settings(runs: Sequence[Run]) -> None:
    """What is set in each run that is left, for a dry run."""
    print("\n".join(f"  {' '.join(texts(run.values))}" for run in runs if run.status == "left"))


def take_finished(runs: Sequence[Run], out: Path) -> None:
    """Give each run the finished record of the same CONFIG that lies in the folder."""
    known = []
    for path in sorted(out.glob("*.json")):
        with contextlib.suppress(UserError):  # another file
            known.append(records.load_record(path))
    for run in runs:
        if run.config is not None:
            # Equal runs may have other output_dirs.
            asked = json.loads(to_json(run.config.to_user_words())) | {"output_dir": ""}
            for record in known:
                same = record.config_requested | {"output_dir": ""} == asked
                if same and record.world_size == run.num_processes and record.status == "ok":
                    run.record = record


def train_each(runs: Sequence[Run], out: Path, conclude: Callable[[Run], str]) -> None:
    """Train what is left, one run after the other, and print what `conclude` says of each; a layout
    that failed with one seed is not tried with the next."""
    out.mkdir(parents=True, exist_ok=True)
    print(f"what they print goes to {short_path(out)}/log.txt", flush=True)
    seeds = {run.values.get("seed") for run in runs}
    for number, run in enumerate(runs, 1):
        if run.status == "ok":
            continue
        place = f"{number:>3}/{len(runs)}  "
        name = f"{run.name}, seed {run.values['seed']}" if len(seeds) > 1 else run.name
        if run.status == "left":
            print(f"{place}{name} ...", flush=True)
            began = time.monotonic()
            train(run, out)
            run.seconds = time.monotonic() - began
        for other in runs:
            same = (other.work, other.name) == (run.work, run.name)
            if same and other.status == "left":
                other.why = run.why
        line = f"{place}{name}: {conclude(run)}"
        left = count(runs, "left")
        durations_s = [other.seconds for other in runs if other.seconds]
        if left and durations_s:
            seconds = left * statistics.mean(durations_s)
            line += f"; {left} left, {tqdm.format_interval(round(seconds))}"
        print(textwrap.fill(line, WIDTH, subsequent_indent=" " * len(place)), flush=True)


def train(run: Run, out: Path) -> None:
    """Do a run in a session of its own and note what came of it; on Ctrl-C or SIGTERM it is told to
    stop first. Raises KeyboardInterrupt then."""
    folder = out / "runs"
    before = set(folder.glob(RECORDS))
    settings = ["--set", *texts(run.values), f"output_dir={folder}"]
    command = [*run.command, f"--num_gpus={run.num_processes}", *settings]
    with (
        open(out / "log.txt", "a+", encoding="utf-8", errors="replace") as log,
        handling({signal.SIGTERM: signal.default_int_handler}),
    ):
        log.write(f"\n$ {' '.join(command)}\n")
        log.flush()
        place = log.tell()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            code = process.wait()
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
            raise
        log.seek(place)
        lines = [line.strip() for line in log if line.strip()]
    # The line in which a run says why it did not start, else its last one.
    errors = [line for line in lines if line.startswith("error: ")]
    said = (errors or lines or [f"exit code {code}"])[-1].removeprefix("error: ")
    for path in sorted({*folder.glob(RECORDS)} - before):  # the last, where auto chose again
        run.record = records.load_record(path)
    if run.record is None:
        run.why = said
    elif run.record.status != "ok":
        run.why = f"{run.record.status}: {run.record.error or said}"


def keep(run: Run, out: Path, git_commit: str | None) -> str:
    """Keep the record of a run that finished. What came of it, in a line."""
    record = run.record
    if record is None or run.why:
        return run.why
    folder = Path(record.run_dir)
    values = json.loads((folder / records.RECORD_FILE).read_text(encoding="utf-8"))
    values["git_commit"] = git_commit or values["git_commit"]
    steps = (folder / records.METRICS_FILE).read_text().splitlines()
    ends = itertools.accumulate(json.loads(line)["step_time_s"] for line in steps)
    values["loss_seconds"] = [round(seconds, 4) for seconds in ends]
    run.record = records.Record.model_validate(values)
    records.write_json(record_path(record, out), values)
    cells = {name: MEASURED[name](record) for name in SAID}
    return ", ".join(f"{name} {cell}" for name, cell in cells.items() if cell != NOTHING)


def record_path(record: records.Record, folder: Path) -> Path:
    """Where to keep a record: named by what distinguishes it, the same run again by a number."""
    name = f"{last_part(record.config['model'])} {record.layout_name} {record.config['precision']}"
    name += f" b{record.batch.micro_batch_size} x{record.world_size}"
    return records.free_path(folder, name.replace(" ", "-"), ".json")


def write_page(runs: Sequence[Run], out: Path) -> None:
    """compare.md with its plots, compare.html, and a table on the screen."""
    groups: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        groups.setdefault(run.work, {}).setdefault(run.name, []).append(run)
    comparisons = []
    for work, rows in groups.items():
        layouts = []
        for name, members in rows.items():
            done = [run.record for run in members if run.record and not run.why]
            why = next((run.why for run in members if run.why), "")
            layouts.append(Layout(name=name, records=done, num_runs=len(members), why=why))
        said = any(layout.records for layout in layouts)  # by the records
        comparisons.append(Comparison(work="" if said else work, layouts=layouts))
    sections = report.build_sections(comparisons)
    report.save_plots(sections, out)
    number = plural(len(runs), "run")
    if count(runs, "ok") < len(runs):
        number = f"{count(runs, 'ok')} of {number}"
    heading = f"{number}, each in processes of its own, one after the other."
    for form in ("md", "html"):
        page = report.page(form, "Strategies side by side", heading, sections)
        (out / f"compare.{form}").write_text(page, encoding="utf-8")
    for section in sections:
        print(f"\n{report.terminal(section)}")
    print(f"\nwrote {short_path(out)}/compare.md and compare.html")
