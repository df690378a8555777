"""Whether every layout computes what one process computes.

The reference is one process that compiles nothing. It trains twice, the second time with other
micro-batches: its differences from itself are rounding. A layout that differs by more than LIMITS,
and by more than SPREADS times the rounding, computes something else. Each tensor is compared with
its own rounding, as Adam makes large steps of gradients that are nothing else. If records are
packed, one process also trains on them one by one, as a layout of its own.

Two process groups train everything: one process, then the processes of the layouts. Starting
processes takes longer than the steps."""

import argparse
import importlib
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

from distributed_training.records.display import duration, fold, short_path
from distributed_training.records.record import write_json
from distributed_training.settings.config import Request
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import plural, require_writable
from distributed_training.settings.machine import detect_machine
from distributed_training.settings.strategies import list_strategies, load_strategy
from distributed_training.start import launch
from distributed_training.start.ranks import current_process, run_ranks
from distributed_training.tools import compare
from distributed_training.tools.parity.trials import (
    NOT_PACKED,
    OK,
    USUALLY,
    Trial,
    layouts_of,
    references_for,
    share_model,
)

BAD = ("differs", "failed")
LAYOUT_S = 6.0  # to build an engine, save and compare; an upper bound of small models


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `parity` takes besides CONFIG's keys."""
    add = parser.add_argument
    add("plan", nargs="?", metavar="PLAN.json", help="layouts, as in results/plans/")
    add("--strategies", metavar="A,B", help="without a plan: separated by commas; default: all")
    add("--out", metavar="FOLDER", help="for parity.html and parity.json; default: in output_dir")
    add("--jobs", metavar="FILE", type=Path, help=argparse.SUPPRESS)  # of a started rank
    parser.set_defaults(seeds=1)


def run(arguments: argparse.Namespace, build: compare.Build, script: Path) -> int:
    """Train under every layout, then write the page; 1 if one computes something else."""
    if arguments.jobs is not None and current_process() is not None:
        from distributed_training.tools.parity import ranks

        return ranks.train_all(arguments.jobs, build)
    if arguments.plan is None and arguments.strategies is None:
        arguments.strategies = ",".join(list_strategies())
    machine = detect_machine()
    wanted, out = compare.plan_runs(arguments, build, script, USUALLY)
    if arguments.out is None:
        out = out.with_name(f"parity-x{wanted[0].num_processes}")
    share_model(wanted, machine)
    trials = [*references_for(wanted), *layouts_of(wanted)]
    if arguments.dry_run:
        for trial in trials:
            print(f"  {' '.join(compare.texts(trial.values))}")
        return 0
    require_writable(out, compare.OTHER_OUT, "parity.html", "parity.json", "log.txt")
    out.mkdir(parents=True, exist_ok=True)
    runs_dir = out / "runs"
    shutil.rmtree(runs_dir, ignore_errors=True)
    runs_dir.mkdir()
    for trial in trials:
        trial.values["output_dir"] = str(runs_dir.absolute())
    say_how_long(trials, build, out)
    group = partial(train_group, trials=trials, out=out, build=build, script=script)
    try:
        group([trial for trial in trials if not trial.is_layout], can_fork=launch.can_fork(machine))
        if why := trials[0].why or trials[1].why:
            raise UserError("one process cannot train this", why)
        group([trial for trial in trials if trial.is_layout], can_fork=launch.can_fork(machine))
    finally:
        shutil.rmtree(runs_dir, ignore_errors=True)
        done = [trial for trial in trials if trial.verdict not in ("", NOT_PACKED)]
        if len(done) > 2:
            from distributed_training.tools.parity.page import write_page  # imports torch

            write_page(out, done, machine)
    return exit_code([trial.verdict for trial in trials])


def exit_code(verdicts: Sequence[str]) -> int:
    """0 if some layout computes the same and none computes something else."""
    return 0 if OK in verdicts and not set(BAD) & set(verdicts) else 1


def say_how_long(trials: Sequence[Trial], build: compare.Build, out: Path) -> None:
    """Print the work and a prediction of its time."""
    layouts = [trial for trial in trials if trial.is_layout]
    processes = layouts[0].num_processes
    steps = [(build(compare.texts(trial.values)), trial.num_processes) for trial in trials
             if not trial.verdict]  # fmt: skip
    seconds = compare.predicted_s(steps, run_s=LAYOUT_S)
    what = f"{plural(len(layouts), 'layout')} of {plural(processes, 'process')} against one process"
    print(fold(f"{what}: {duration(seconds)}; output of libraries: {short_path(out)}/log.txt"))
    sys.stdout.flush()


def train_group(
    wanted: Sequence[Trial], *, trials: Sequence[Trial], out: Path, build: compare.Build,
    script: Path, can_fork: bool,
) -> None:  # fmt: skip
    """Let one group of processes do the `wanted` trials. If a trial ends the group, another group
    does the remaining ones. Raises KeyboardInterrupt if the groups were told to stop."""
    jobs_file, results = out / "runs/jobs.json", out / "runs/results.jsonl"
    count = wanted[0].num_processes
    what: list[str] | Callable[[], int] = [str(script), *sys.argv[1:], f"--jobs={jobs_file}"]
    if can_fork:
        launch.prepare_environment(count)
        ranks = import_ranks(
            [build(compare.texts(trial.values)) for trial in wanted if not trial.verdict]
        )
        what = partial(ranks.train_all, jobs_file, build)
    while left := [trial for trial in wanted if not trial.verdict]:
        jobs = {
            "runs": {trial.key: trial.values for trial in left},
            "names": {trial.key: trial.name for trial in left},
            "place": [sum(bool(trial.verdict) for trial in trials), len(trials)],
            "out": str(out),
        }
        write_json(jobs_file, jobs)
        results.write_text("")
        log = out / "log.txt"
        place = log.stat().st_size if log.is_file() else 0
        ended = run_ranks(what, count)
        lines = [json.loads(text) for text in results.read_text().splitlines()]
        found = {line["key"]: line for line in lines if "key" in line}
        for trial in left:
            take(trial, found.get(trial.key))
        if ended.signum:
            raise KeyboardInterrupt
        began = [line["began"] for line in lines if "began" in line]
        lost = [trial for trial in left if not trial.verdict and trial.key in began]
        for trial in lost or [trial for trial in left if not trial.verdict]:
            trial.verdict = "failed"
            trial.why = ended.reason or first_error(log, place)
            print(fold(f"{trial.name} failed: {trial.why}"), flush=True)


def import_ranks(configs: Sequence[Request]) -> ModuleType:
    """Import before the fork what each rank would import by itself."""
    launch.import_worker().use_cpu()
    importlib.import_module("torch._dynamo")  # which optimizers import
    for config in configs:
        load_strategy(config).traits.load()
    return importlib.import_module("distributed_training.tools.parity.ranks")


def take(trial: Trial, line: Mapping[str, object] | None) -> None:
    """Take over a line of results."""
    if line is not None:
        for name in ("verdict", "why", "apart", "seconds", "mesh"):
            setattr(trial, name, line.get(name))
        trial.about = dict(line)


def first_error(log: Path, place: int) -> str:
    """The line after `place` that names the first exception, unless a lost peer caused it; or the
    last line."""
    with open(log, encoding="utf-8", errors="replace") as file:
        file.seek(place)
        lines = [line.strip() for line in file if line.strip()]
    errors = [line for line in lines if "Error" in line.partition(":")[0]]
    causes = [line for line in errors if " peer" not in line]
    return next(iter([*causes, *errors, *lines[-1:]]), "its processes ended without a message")
