"""`compare`: the same work under several strategies, one run after the other, on one page.

    python real_model_example.py compare --strategies dp,fsdp,zero2 --seeds 3
    python real_model_example.py compare results/plans/h200-x1.json --out results/records/h200-x1

A plan is JSON: {"num_gpus": N, "common": {CONFIG keys}, "runs": [{CONFIG keys}, ...]}. Every run is
the command that a user would type; what it prints goes to log.txt. Records lie in the folder as
soon as they are there: started again, only runs without one are done. No torch in this process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
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
from distributed_training.records.display import WIDTH, gib, short_path
from distributed_training.records.record import (
    METRICS_FILE,
    RECORD_FILE,
    Record,
    free_path,
    load_state,
    plural,
    write_json,
)
from distributed_training.records.tables import (
    layout_words,
    measured_peak,
    tokens_per_s,
    validation_loss,
)
from distributed_training.run.launch import requested_processes
from distributed_training.settings.config import AUTO, KEYS, RunConfig
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import did_you_mean, load_json, shown, user_path
from distributed_training.settings.strategies import list_strategies, strategy_options

# Not part of what is compared; a key that is typed or in the plan stays as it is.
QUIETLY = {"checkpoint_every": 0, "export": False, "generate": None}
SIZE_OF_STEP = ("batch_size", "grad_accum_steps")  # work, though not marked as such
ELSEWHERE = ("output_dir",)  # keys that may differ between equal runs
RECORDS = f"[!l]*/{RECORD_FILE}"  # not through the link "latest"
PATIENCE_S = 30.0  # for a run that was told to stop
Build = Callable[[Sequence[str]], RunConfig]  # "key=value" texts -> CONFIG with them
Values = dict[str, Any]


@dataclass(kw_only=True, slots=True)
class Run:
    """One training that is wanted, and what came of it."""

    values: Values  # CONFIG keys over CONFIG, strategy and seed among them
    config: RunConfig | None = None  # None: refused before it was started
    record: Record | None = None
    why: str = ""  # there is no finished record

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
    num_processes: int
    script: Path
    options: list[str]  # of every run besides its values and how many processes
    git_commit: str | None
    durations_s: list[float] = field(default_factory=list)

    @property
    def left(self) -> list[Run]:
        """Neither finished nor failed."""
        return [run for run in self.runs if run.record is None and not run.why]

    @property
    def num_finished(self) -> int:
        return sum(run.record is not None for run in self.runs)


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
    take_finished(wanted)
    processes = plural(wanted.num_processes, "process")
    kept = f"; {wanted.num_finished} are there already" if wanted.num_finished else ""
    runs = plural(len(wanted.runs), "run")
    print(f"{runs} with {processes} each, in {short_path(wanted.out)}{kept}")
    if arguments.dry_run:
        print("\n".join(f"  {' '.join(run.texts)}" for run in wanted.left))
        return 0
    wanted.out.mkdir(parents=True, exist_ok=True)
    print(f"what they print goes to {short_path(wanted.out)}/log.txt", flush=True)
    interrupted = False
    try:
        do_what_is_left(wanted)
    except KeyboardInterrupt:
        interrupted = True
        print(f"interrupted with {len(wanted.left)} to go; the same command goes on with them")
    write_page(wanted)
    if interrupted:
        return 128 + signal.SIGINT
    return 0 if wanted.num_finished else 1


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
    typed = by_name(dict(text.partition("=")[::2] for text in arguments.overrides))
    plan: dict[str, Any] = {}
    if arguments.plan is not None:
        plan = read_plan(user_path("the plan", arguments.plan))
        name = Path(arguments.plan).stem
        common = always | by_name(plan.get("common", {}))
        layouts = [common | by_name(run) | typed for run in plan["runs"]]
    else:
        names = [known_strategy(word.strip()) for word in arguments.strategies.split(",")]
        name = "-".join(names)
        layouts = [always | known_to(name, typed, names) | {"strategy": name} for name in names]
    asked = str(arguments.num_gpus or plan.get("num_gpus", "all"))
    count = requested_processes(asked, detect_machine(), {})
    runs = [run for seed in range(arguments.seeds) for run in with_seed(layouts, seed, build)]
    built = next((run.config for run in runs if run.config is not None), None)
    if built is None:
        raise UserError(runs[0].why if runs else "the plan has no runs")
    options = []
    if arguments.force:
        options.append("--force")
    if arguments.preset is not None:
        options.append(f"--preset={arguments.preset}")
    out = Path(built.output_dir) / f"compare-{name}-x{count}"
    if arguments.out:
        out = user_path("--out", arguments.out)
    return Wanted(
        runs=runs, out=out, num_processes=count, script=script, options=options,
        git_commit=arguments.git_commit,
    )  # fmt: skip


def read_plan(path: Path) -> dict[str, Any]:
    """A plan's JSON. Raises UserError for what is not a plan."""
    plan = load_json(path, "plan")
    runs = plan.get("runs") if isinstance(plan, dict) else None
    if not isinstance(runs, list) or not all(isinstance(run, dict) for run in runs):
        fix = 'write {"num_gpus": N, "common": {...}, "runs": [{...}, ...]}'
        raise UserError(f"{path} is not a plan of runs", fix=fix)
    return plan


def known_strategy(name: str) -> str:
    """The name; raises UserError for one that is not a strategy."""
    known = (*list_strategies(), AUTO)
    if name not in known:
        fix = did_you_mean(name, known, f"choose from {', '.join(known)}")
        raise UserError(f"--strategies: {shown(name)} is not a strategy", fix=fix)
    return name


def known_to(strategy: str, typed: Values, names: Sequence[str]) -> dict[str, Any]:
    """What is typed, without the keys that only the engines of other strategies have."""
    own = {name: set(strategy_options(name).model_fields) for name in names}
    foreign = set().union(*own.values()) - own[strategy]
    return {key: value for key, value in typed.items() if key not in foreign}


def by_name(values: Values) -> dict[str, Any]:
    """The values under their keys' own names."""
    names = {alias: key.name for key in KEYS.values() for alias in key.aliases}
    return {names.get(name.strip(), name.strip()): value for name, value in values.items()}


def with_seed(layouts: Sequence[Values], more: int, build: Build) -> list[Run]:
    """Runs of all layouts with the seed that CONFIG gives them and `more`."""
    found = []
    for layout in layouts:
        try:
            config = build([f"{key}={value}" for key, value in layout.items()])
            if config.batch_size == AUTO:
                what = "compare needs a batch_size: each strategy would choose its own"
                raise UserError(what, fix="add --batch_size 8")
            config = config.model_copy(update={"seed": config.seed + more})
            values = {**layout, "strategy": config.strategy, "seed": config.seed}
            found.append(Run(values=values, config=config))
        except UserError as error:
            values = {"strategy": "?", **layout, "seed": more}
            found.append(Run(values=values, config=None, why=str(error)))
    return found


def take_finished(wanted: Wanted) -> None:
    """Give each run the finished record of the same CONFIG that lies in the folder."""
    known: dict[str, Record] = {}
    for path in sorted(wanted.out.glob("*.json")):
        values = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(values, dict) and values.get("status") == "ok":
            record = Record.model_validate(values)
            known[_asked(record.config_requested, record.world_size)] = record
    for run in wanted.runs:
        if run.config is not None:
            words = json.loads(to_json(run.config.to_user_words()))
            run.record = known.get(_asked(words, wanted.num_processes))


def _asked(words: Values, num_processes: int) -> str:
    kept = {key: value for key, value in words.items() if key not in ELSEWHERE}
    return json.dumps([num_processes, kept], sort_keys=True)


def do_what_is_left(wanted: Wanted) -> None:
    """Train, one run after the other; a layout that failed with one seed is not tried with the
    next."""
    seeds = len({run.values["seed"] for run in wanted.runs}) > 1
    for number, run in enumerate(wanted.runs, 1):
        if run.record is not None:
            continue
        place = f"{number:>3}/{len(wanted.runs)}  "
        name = run.values["strategy"]
        if seeds:
            name += f", seed {run.values['seed']}"
        began = time.monotonic()
        if not run.why:
            print(f"{place}{name} ...", flush=True)
            train(wanted, run)
            wanted.durations_s.append(time.monotonic() - began)
        for other in wanted.left:
            if run.why and other.layout == run.layout:
                other.why = run.why
        line = f"{place}{name}: {outcome(run)}{_left(wanted)}"
        print(textwrap.fill(line, WIDTH, subsequent_indent=" " * len(place)), flush=True)


def outcome(run: Run) -> str:
    """What came of a run, in a line."""
    if run.record is None:
        return run.why
    parts = [f"peak {gib(measured_peak(run.record))}"]
    if (speed := tokens_per_s(run.record)) is not None:
        parts.insert(0, f"{speed:,.0f} tokens/s")
    if (loss := validation_loss(run.record)) is not None:
        parts.append(f"validation loss {loss:.4f}")
    return ", ".join(parts)


def _left(wanted: Wanted) -> str:
    """How many runs there still are, and for how long if they take as long as those before."""
    if not wanted.left or not wanted.durations_s:
        return ""
    seconds = len(wanted.left) * sum(wanted.durations_s) / len(wanted.durations_s)
    return f"; {len(wanted.left)} left, {tqdm.format_interval(round(seconds))}"


def train(wanted: Wanted, run: Run) -> None:
    """Do one run and keep its record, or the reason why there is none."""
    folder, run.why = launch(wanted, run.texts, wanted.num_processes)
    if folder is None:
        return
    values = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
    values["git_commit"] = wanted.git_commit or values["git_commit"]
    values["loss_seconds"] = training_seconds(folder / METRICS_FILE)
    record = Record.model_validate(values)
    if not run.why:
        run.record = record
        write_json(record_path(record, wanted.out), values)


def launch(wanted: Wanted, settings: Sequence[str], num_processes: int) -> tuple[Path | None, str]:
    """Train with `settings` (key=value texts). The run's folder, None where it did not start, and
    why it did not end well, "" where it did."""
    folder = wanted.out / "runs"
    before = set(folder.glob(RECORDS))
    own = ["--set", *settings, f"output_dir={folder}"]
    options = [f"--num_gpus={num_processes}", *wanted.options]
    command = [sys.executable, str(wanted.script), *options, *own]
    with open(wanted.out / "log.txt", "a", encoding="utf-8") as log:
        log.write(f"\n$ {' '.join(command)}\n")
        log.flush()
        place = log.tell()
        code = wait_for(command, log)
    said = _reason((wanted.out / "log.txt").read_bytes()[place:].decode(errors="replace"), code)
    new = set(folder.glob(RECORDS)) - before
    if not new:
        return None, said
    path = new.pop()
    record = load_state(path)
    failed = record.status != "ok"
    return path.parent, f"{record.status}: {record.error or said}" if failed else ""


def wait_for(command: Sequence[str], log: Any) -> int:
    """The exit code of a program in a session of its own; on Ctrl-C or SIGTERM it is told to stop
    first. Raises KeyboardInterrupt then."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )
    try:
        return process.wait()
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _reason(said: str, code: int) -> str:
    """The line in which a run says why it did not start, else its last one."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or [f"exit code {code}"])[-1]


def training_seconds(metrics: Path) -> list[float]:
    """Seconds of training until the end of each step, evaluation and saving left out."""
    if not metrics.is_file():  # it failed before its first step
        return []
    steps = [json.loads(line)["step_time_s"] for line in metrics.read_text().splitlines()]
    return [round(seconds, 4) for seconds in itertools.accumulate(steps)]


def record_path(record: Record, folder: Path) -> Path:
    """Where to keep a record: named by what distinguishes it, the same run again by a number."""
    model = record.config["model"].rpartition("/")[2]
    words = [model, record.strategy["name"], *layout_words(record), record.config["precision"]]
    name = "-".join([*words, f"b{record.batch.micro_batch_size}", f"x{record.world_size}"])
    return free_path(folder, name, ".json")


def comparisons_of(wanted: Wanted) -> list[Comparison]:
    """The runs by what they were to do, then by layout."""
    work = [key for key in KEYS if KEYS[key].work or key in SIZE_OF_STEP]
    groups: dict[str, list[Run]] = {}
    for run in wanted.runs:
        words = [f"{key} {value}" for key, value in run.layout.items() if key in work]
        groups.setdefault(", ".join(words), []).append(run)
    found = []
    for done, runs in groups.items():
        if any(run.record for run in runs):
            done = ""  # the records say it
        found.append(Comparison(work=done, layouts=layouts_of(runs)))
    return found


def layouts_of(runs: Sequence[Run]) -> list[Layout]:
    """Runs by layout, each named by what tells it from the others."""
    groups: dict[str, list[Run]] = {}
    for name, run in zip(names_of(runs), runs, strict=True):
        groups.setdefault(name, []).append(run)
    return [
        Layout(
            name=name,
            records=[run.record for run in members if run.record is not None],
            num_runs=len(members),
            why=next((run.why for run in members if run.why), ""),
        )
        for name, members in groups.items()
    ]


def names_of(runs: Sequence[Run]) -> list[str]:
    """Each run's strategy, and the settings in which their layouts differ."""
    telling = [key for key in differing([run.layout for run in runs]) if key != "strategy"]
    names = []
    for run in runs:
        words = [f"{key}={run.layout[key]}" for key in telling if key in run.layout]
        names.append(" ".join([run.values["strategy"], *words]))
    return names


def write_page(wanted: Wanted) -> None:
    """compare.md with its plots, compare.html, and a table on the screen."""
    comparisons = comparisons_of(wanted)
    sections = list(map(page.build_section, comparisons))
    plots = page.save_plots(sections, wanted.out)
    runs = plural(len(wanted.runs), "run")
    if wanted.num_finished < len(wanted.runs):
        runs = f"{wanted.num_finished} of {runs}"
    heading = f"{runs}, each in processes of its own, one after the other."
    title = "Strategies side by side"
    text = page.markdown(title, heading, sections, plots)
    (wanted.out / "compare.md").write_text(text, encoding="utf-8")
    text = page.html(title, heading, sections)
    (wanted.out / "compare.html").write_text(text, encoding="utf-8")
    for comparison in comparisons:
        print(f"\n{page.terminal(comparison)}")
    print(f"\nwrote {short_path(wanted.out)}/compare.md and compare.html")
