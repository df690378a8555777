"""The same work under several strategies, one after the other, on one page.

A plan is JSON: {"num_gpus": N, "common": {CONFIG keys}, "runs": [{CONFIG keys}, ...]}. Every run is
the command that a user would type; what it prints goes to log.txt. Records lie in the folder as
soon as they are there: started again, only runs without one are done. No torch in this process.
"""

from __future__ import annotations

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic_core import to_json
from tqdm import tqdm

from distributed_training.plan.machine import detect_machine
from distributed_training.records import page
from distributed_training.records.comparison import Comparison, Layout, differing
from distributed_training.records.display import NOT_MEASURED, WIDTH, short_path
from distributed_training.records.record import (
    METRICS_FILE,
    RECORD_FILE,
    Record,
    free_path,
    load_record,
    plural,
    write_json,
)
from distributed_training.records.tables import COLUMNS, layout_words
from distributed_training.run.launch import requested_processes
from distributed_training.run.ranks import handling
from distributed_training.settings.config import AUTO, KEYS, RunConfig
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import expand_home, load_json
from distributed_training.settings.strategies import strategy_options

# Not part of what is compared; a key that is typed or in the plan stays as it is.
QUIETLY = {"checkpoint_every": 0, "export": False, "generate": None}
SIZE_OF_STEP = ("batch_size", "grad_accum_steps")  # work, though not marked as such
RECORDS = f"[!l]*/{RECORD_FILE}"  # not through the link "latest"
PATIENCE_S = 30.0  # for a run that was told to stop
SAID = ("tokens/s", "peak GPU memory", "peak host memory", "validation loss")  # of each run
Build = Callable[[Sequence[str]], RunConfig]  # "key=value" texts -> CONFIG with them
Values = dict[str, Any]


@dataclass(kw_only=True, slots=True)
class Run:
    """One training that is wanted, and what came of it."""

    values: Values  # CONFIG keys over CONFIG, strategy and seed among them
    num_processes: int
    name: str = ""
    config: RunConfig | None = None  # None: refused before it was started
    record: Record | None = None  # None: not started
    why: str = ""  # it did not start, or end well
    seconds: float = 0.0
    verdict: str = ""  # parity's, and by how much it differs: what -> where -> share
    apart: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def finished(self) -> Record | None:
        return None if self.why else self.record

    @property
    def left(self) -> bool:
        """Neither finished nor failed."""
        return self.record is None and not self.why

    @property
    def texts(self) -> list[str]:
        return [f"{key}={value}" for key, value in self.values.items()]

    @property
    def layout(self) -> Values:
        """What is compared: all but the seed."""
        return {key: value for key, value in self.values.items() if key != "seed"}


@dataclass(kw_only=True, slots=True)
class Wanted:
    """All runs of a comparison and where they go."""

    runs: list[Run]
    out: Path
    command: list[str]  # of every run, but for its values and how many processes


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `compare` takes besides CONFIG's keys."""
    add = parser.add_argument
    add("plan", nargs="?", metavar="PLAN.json", help="runs, as in results/plans/")
    add("--strategies", metavar="A,B", help="without a plan: strategies, separated by commas")
    add("--seeds", type=int, default=1, metavar="N", help="runs of each, with seed, seed + 1, ...")
    add("--out", metavar="FOLDER", help="for records and page; default: in output_dir")
    add("--git_commit", help=argparse.SUPPRESS)  # of this tree, where it has no .git


def run(arguments: argparse.Namespace, build: Build, script: Path) -> int:
    """Do what is missing, then write the page; 1 where no run finished, 130 where interrupted."""
    wanted = plan_runs(arguments, build, script, QUIETLY)
    runs = wanted.runs
    take_finished(wanted)
    kept = sum(run.finished is not None for run in runs)
    processes = plural(runs[0].num_processes, "process")
    about = f"{plural(len(runs), 'run')} with {processes} each, in {short_path(wanted.out)}"
    print(f"{about}; {kept} are there already" if kept else about)
    if arguments.dry_run:
        print_commands(runs)
        return 0
    code = 0
    try:
        train_each(wanted, lambda run: keep(run, wanted.out, arguments.git_commit))
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
        left = sum(run.left for run in runs)
        print(f"interrupted with {left} to go; the same command goes on with them")
    write_page(wanted)
    return code or int(not any(run.finished for run in runs))


def print_commands(runs: Sequence[Run]) -> None:
    """What is set in each run that is left, for a dry run."""
    print("\n".join(f"  {' '.join(run.texts)}" for run in runs if run.left))


def plan_runs(arguments: argparse.Namespace, build: Build, script: Path, always: Values) -> Wanted:
    """Which runs are wanted, with `always` where nothing else is typed or in the plan. Raises
    UserError where nothing can be compared."""
    if arguments.seeds < 1:
        raise UserError(f"--seeds {arguments.seeds} is not at least 1")
    if (arguments.plan is None) == (arguments.strategies is None):
        what = "give either a plan or --strategies"
        raise UserError(what, fix="type --strategies dp,fsdp or PLAN.json")
    if arguments.cluster is not None:
        raise UserError("--cluster only plans, and this trains", fix="leave it out")
    if arguments.plan is not None:
        plan = read_plan(Path(expand_home("the plan", arguments.plan)))
        name = Path(arguments.plan).stem
    else:
        plan = {"runs": [{"strategy": word.strip()} for word in arguments.strategies.split(",")]}
        name = "-".join(run["strategy"] for run in plan["runs"])
    common = always | by_name(plan.get("common", {}))
    layouts = [common | by_name(run) for run in plan["runs"]]
    typed = by_name(dict(text.partition("=")[::2] for text in arguments.overrides))
    own = [set(strategy_options(each.get("strategy", AUTO)).model_fields) for each in layouts]
    for layout, keys in zip(layouts, own, strict=True):
        foreign = set().union(*own) - keys  # that only the engines of other strategies have
        layout.update((key, value) for key, value in typed.items() if key not in foreign)
    asked = str(arguments.num_gpus or plan.get("num_gpus", "all"))
    count = requested_processes(asked, detect_machine(), {})
    seeds = range(arguments.seeds)
    runs = [with_seed(layout, seed, build, count) for seed in seeds for layout in layouts]
    if len({run.values["seed"] for run in runs}) > 1:
        for each in runs:
            each.name += f", seed {each.values['seed']}"
    built = next((run.config for run in runs if run.config is not None), None)
    if built is None:
        raise UserError(runs[0].why if runs else "the plan has no runs")
    options = {"max_restarts": arguments.max_restarts, "preset": arguments.preset}
    more = [f"--{name}={value}" for name, value in options.items() if value]
    command = [sys.executable, str(script), *more]
    if arguments.force:
        command.append("--force")
    out = Path(built.output_dir) / f"compare-{name}-x{count}"
    if arguments.out:
        out = Path(expand_home("--out", arguments.out))
    return Wanted(runs=runs, out=out, command=command)


def read_plan(path: Path) -> dict[str, Any]:
    """A plan's JSON. Raises UserError for what is not a plan."""
    plan = load_json(path, "plan")
    runs = plan.get("runs") if isinstance(plan, dict) else None
    if not isinstance(runs, list) or not all(isinstance(run, dict) for run in runs):
        fix = 'write {"num_gpus": N, "common": {...}, "runs": [{...}, ...]}'
        raise UserError(f"{path} is not a plan of runs", fix=fix)
    return plan


def by_name(values: Values) -> dict[str, Any]:
    """The values under their keys' own names."""
    names = {alias: key.name for key in KEYS.values() for alias in key.aliases}
    return {names.get(name.strip(), name.strip()): value for name, value in values.items()}


def with_seed(layout: Values, more: int, build: Build, num_processes: int) -> Run:
    """A run of a layout with the seed that CONFIG gives it and `more`."""
    values = {"strategy": "?", **layout, "seed": more}
    run = Run(values=values, num_processes=num_processes, name=values["strategy"])
    try:
        config = build([f"{key}={value}" for key, value in layout.items()])
        if config.batch_size == AUTO:
            what = "compare needs a batch_size: each strategy would choose its own"
            raise UserError(what, fix="add --batch_size 8")
    except UserError as error:
        run.why = str(error)
        return run
    run.config = config.model_copy(update={"seed": config.seed + more})
    run.name = config.strategy
    run.values |= {"strategy": config.strategy, "seed": run.config.seed}
    return run


def take_finished(wanted: Wanted) -> None:
    """Give each run the finished record of the same CONFIG that lies in the folder."""
    known = []
    for path in sorted(wanted.out.glob("*.json")):
        with contextlib.suppress(UserError):  # another file
            known.append(load_record(path))
    for run in wanted.runs:
        if run.config is not None:
            # Equal runs may have other output_dirs.
            asked = json.loads(to_json(run.config.to_user_words())) | {"output_dir": ""}
            for record in known:
                same = record.config_requested | {"output_dir": ""} == asked
                if same and record.world_size == run.num_processes and record.status == "ok":
                    run.record = record


def train_each(wanted: Wanted, conclude: Callable[[Run], str]) -> None:
    """Train what is left, one run after the other, and print what `conclude` says of each; a layout
    that failed with one seed is not tried with the next."""
    runs = wanted.runs
    wanted.out.mkdir(parents=True, exist_ok=True)
    print(f"what they print goes to {short_path(wanted.out)}/log.txt", flush=True)
    for number, run in enumerate(runs, 1):
        if run.record is not None:
            continue
        place = f"{number:>3}/{len(runs)}  "
        if not run.why:
            print(f"{place}{run.name} ...", flush=True)
            began = time.monotonic()
            launch(wanted, run)
            run.seconds = time.monotonic() - began
        for other in runs:
            if run.why and other.left and other.layout == run.layout:
                other.why = run.why
        line = f"{place}{run.name}: {conclude(run)}"
        left = sum(other.left for other in runs)
        durations_s = [other.seconds for other in runs if other.seconds]
        if left and durations_s:
            seconds = left * statistics.mean(durations_s)
            line += f"; {left} left, {tqdm.format_interval(round(seconds))}"
        print(textwrap.fill(line, WIDTH, subsequent_indent=" " * len(place)), flush=True)


def launch(wanted: Wanted, run: Run) -> None:
    """Do a run: its record, unless it did not start, and why it did not end well."""
    folder = wanted.out / "runs"
    before = set(folder.glob(RECORDS))
    own = [f"--num_gpus={run.num_processes}", "--set", *run.texts, f"output_dir={folder}"]
    command = [*wanted.command, *own]
    with open(wanted.out / "log.txt", "a+", encoding="utf-8", errors="replace") as log:
        log.write(f"\n$ {' '.join(command)}\n")
        log.flush()
        place = log.tell()
        code = wait_for(command, log)
        log.seek(place)
        lines = [line.strip() for line in log if line.strip()]
    # The line in which a run says why it did not start, else its last one.
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    said = (errors or lines or [f"exit code {code}"])[-1]
    for path in set(folder.glob(RECORDS)) - before:
        run.record = load_record(path)
    if run.record is None:
        run.why = said
    elif run.record.status != "ok":
        run.why = f"{run.record.status}: {run.record.error or said}"


def keep(run: Run, out: Path, git_commit: str | None) -> str:
    """Keep the record of a run that finished. What came of it, in a line."""
    record = run.finished
    if record is None:
        return run.why
    folder = Path(record.run_dir)
    values = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
    values["git_commit"] = git_commit or values["git_commit"]
    steps = (folder / METRICS_FILE).read_text().splitlines()
    ends = itertools.accumulate(json.loads(line)["step_time_s"] for line in steps)
    values["loss_seconds"] = [round(seconds, 4) for seconds in ends]
    run.record = Record.model_validate(values)
    write_json(record_path(record, out), values)
    cells = {name: COLUMNS[name](record) for name in SAID}
    return ", ".join(f"{name} {cell}" for name, cell in cells.items() if cell != NOT_MEASURED)


def wait_for(command: Sequence[str], log: Any) -> int:
    """The exit code of a program in a session of its own; on Ctrl-C or SIGTERM it is told to stop
    first. Raises KeyboardInterrupt then."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )
    with handling({signal.SIGTERM: signal.default_int_handler}):
        try:
            return process.wait()
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
            raise


def record_path(record: Record, folder: Path) -> Path:
    """Where to keep a record: named by what distinguishes it, the same run again by a number."""
    model = record.config["model"].rpartition("/")[2]
    words = [model, record.strategy["name"], *layout_words(record), record.config["precision"]]
    name = "-".join([*words, f"b{record.batch.micro_batch_size}", f"x{record.world_size}"])
    return free_path(folder, name, ".json")


def comparisons_of(runs: Sequence[Run]) -> list[Comparison]:
    """The runs by what they were to do, then by layout."""
    work = [key for key in KEYS if KEYS[key].work or key in SIZE_OF_STEP]
    groups: dict[str, list[Run]] = {}
    for run in runs:
        words = [f"{key} {value}" for key, value in run.layout.items() if key in work]
        groups.setdefault(", ".join(words), []).append(run)
    found = []
    for asked, members in groups.items():
        layouts = []
        for name, alike in by_layout(members).items():
            records = [run.finished for run in alike if run.finished is not None]
            why = next((run.why for run in alike if run.why), "")
            layouts.append(Layout(name=name, records=records, num_runs=len(alike), why=why))
        said = any(layout.records for layout in layouts)  # by the records
        found.append(Comparison(work="" if said else asked, layouts=layouts))
    return found


def by_layout(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs by strategy and the settings in which their layouts differ."""
    telling = set(differing([run.layout for run in runs])) - {"strategy"}
    found: dict[str, list[Run]] = {}
    for run in runs:
        words = [f"{key}={value}" for key, value in run.layout.items() if key in telling]
        found.setdefault(" ".join([run.values["strategy"], *words]), []).append(run)
    return found


def write_page(wanted: Wanted) -> None:
    """compare.md with its plots, compare.html, and a table on the screen."""
    comparisons = comparisons_of(wanted.runs)
    sections = page.build_sections(comparisons)
    page.save_plots(sections, wanted.out)
    finished = sum(run.finished is not None for run in wanted.runs)
    runs = plural(len(wanted.runs), "run")
    if finished < len(wanted.runs):
        runs = f"{finished} of {runs}"
    heading = f"{runs}, each in processes of its own, one after the other."
    title = "Strategies side by side"
    text = page.markdown(title, heading, sections)
    (wanted.out / "compare.md").write_text(text, encoding="utf-8")
    text = page.html(title, heading, sections)
    (wanted.out / "compare.html").write_text(text, encoding="utf-8")
    for comparison in comparisons:
        print(f"\n{page.terminal(comparison)}")
    print(f"\nwrote {short_path(wanted.out)}/compare.md and compare.html")
