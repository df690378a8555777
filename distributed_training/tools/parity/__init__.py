"""Check that every layout computes the same results as a single process.

The reference is a training run in a single process without compilation. The reference is trained
twice, the second time with a different micro-batch size. The difference between these two runs is
the rounding error. A layout fails if its results differ from the reference by more than LIMITS and
by more than ROUNDING_FACTOR times the rounding error. Each tensor has a separate rounding error,
because Adam turns gradients that consist only of rounding errors into large steps. If records are
packed, a single process also trains with one record per row. This run is checked in the same way as
a layout.

A single process trains all reference runs, and one group of processes trains all layouts. Starting
new processes for each run would take longer than training its few steps."""

import argparse
import importlib
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

from distributed_training.records.display import fold, format_duration, short_path
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
    DEFAULTS,
    NOT_PACKED,
    OK,
    Trial,
    layouts_of,
    references_for,
    share_model,
)

BAD_VERDICTS = ("differs", "failed")
LAYOUT_S = 6.0  # seconds to build an engine, save and compare: an upper bound for small models


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `parity` that are not CONFIG keys."""
    add = parser.add_argument
    add("plan", nargs="?", metavar="PLAN.json", help="layouts to check, as in results/plans/")
    add("--strategies", metavar="A,B", help="strategies to check instead of a plan (default: all)")
    add(
        "--out",
        metavar="FOLDER",
        help="folder for parity.html and parity.json (default: in output_dir)",
    )
    # The parent process passes the jobs to its ranks.
    add("--jobs", metavar="FILE", type=Path, help=argparse.SUPPRESS)
    parser.set_defaults(seeds=1)


def run(arguments: argparse.Namespace, build: compare.Build, script: Path) -> int:
    """Train under every layout, then write the page. Return the exit code, which is 0 if the
    layouts compute the same results as a single process."""
    if arguments.jobs is not None and current_process() is not None:
        from distributed_training.tools.parity import ranks

        return ranks.train_all(arguments.jobs, build)
    if arguments.plan is None and arguments.strategies is None:
        arguments.strategies = ",".join(list_strategies())
    machine = detect_machine()
    runs, out = compare.build_runs(arguments, build, script, DEFAULTS)
    if arguments.out is None:
        out = out.with_name(f"parity-x{runs[0].num_processes}")
    share_model(runs, machine)
    trials = [*references_for(runs), *layouts_of(runs)]
    if arguments.dry_run:
        for trial in trials:
            print(f"  {' '.join(compare.format_overrides(trial.values))}")
        return 0
    require_writable(out, compare.OTHER_OUT_FIX, "parity.html", "parity.json", "log.txt")
    out.mkdir(parents=True, exist_ok=True)
    runs_dir = out / "runs"
    shutil.rmtree(runs_dir, ignore_errors=True)
    runs_dir.mkdir()
    for trial in trials:
        trial.values["output_dir"] = str(runs_dir.absolute())
    print_prediction(trials, build, out)
    group = partial(train_group, trials=trials, out=out, build=build, script=script)
    try:
        group([trial for trial in trials if not trial.is_layout], can_fork=launch.can_fork(machine))
        if why := trials[0].why or trials[1].why:
            raise UserError("The single-process reference run failed", why)
        group([trial for trial in trials if trial.is_layout], can_fork=launch.can_fork(machine))
    finally:
        shutil.rmtree(runs_dir, ignore_errors=True)
        finished = [trial for trial in trials if trial.verdict not in ("", NOT_PACKED)]
        if len(finished) > 2 and not trials[0].why:
            from distributed_training.tools.parity.page import write_page  # the import loads torch

            num_missing = sum(trial.is_layout and not trial.verdict for trial in trials)
            write_page(out, finished, machine, num_missing=num_missing)
    return exit_code([trial.verdict for trial in trials])


def exit_code(verdicts: Sequence[str]) -> int:
    """Return 0 if at least one layout computes the same results as a single process and no layout
    fails or computes different results. Otherwise, return 1."""
    return 0 if OK in verdicts and not set(BAD_VERDICTS) & set(verdicts) else 1


def print_prediction(trials: Sequence[Trial], build: compare.Build, out: Path) -> None:
    """Print the number of layouts and the predicted duration of the check."""
    layouts = [trial for trial in trials if trial.is_layout]
    processes = layouts[0].num_processes
    remaining = [
        (build(compare.format_overrides(trial.values)), trial.num_processes)
        for trial in trials
        if not trial.verdict
    ]
    seconds = compare.predicted_s(remaining, run_s=LAYOUT_S)
    text = f"Comparing {plural(len(layouts), 'layout')} of {plural(processes, 'process')} with one "
    text += f"process: {format_duration(seconds)}."
    print(fold(f"{text} The output of libraries is in {short_path(out)}/log.txt."))
    sys.stdout.flush()


def train_group(
    group_trials: Sequence[Trial], *, trials: Sequence[Trial], out: Path, build: compare.Build,
    script: Path, can_fork: bool,
) -> None:  # fmt: skip
    """Run `group_trials`, a subset of `trials`, in one group of processes. If the group exits
    during a trial, run the remaining trials in a new group. Raises KeyboardInterrupt on Ctrl-C and
    SIGTERM."""
    jobs_file, results = out / "runs/jobs.json", out / "runs/results.jsonl"
    count = group_trials[0].num_processes
    command: list[str] | Callable[[], int] = [str(script), *sys.argv[1:], f"--jobs={jobs_file}"]
    if can_fork:
        launch.prepare_environment(count)
        ranks = import_ranks(
            [
                build(compare.format_overrides(trial.values))
                for trial in group_trials
                if not trial.verdict
            ]
        )
        command = partial(ranks.train_all, jobs_file, build)
    while remaining := [trial for trial in group_trials if not trial.verdict]:
        jobs = {
            "runs": {trial.key: trial.values for trial in remaining},
            "names": {trial.key: trial.name for trial in remaining},
            "progress": [sum(bool(trial.verdict) for trial in trials), len(trials)],
            "out": str(out),
        }
        write_json(jobs_file, jobs)
        results.write_text("")
        log = out / "log.txt"
        log_size = log.stat().st_size if log.is_file() else 0
        outcome = run_ranks(command, count)
        lines = [json.loads(text) for text in results.read_text().splitlines()]
        results_by_key = {line["key"]: line for line in lines if "key" in line}
        for trial in remaining:
            set_result(trial, results_by_key.get(trial.key))
        if outcome.signum:
            raise KeyboardInterrupt
        started_keys = [line["began"] for line in lines if "began" in line]
        unfinished = [trial for trial in remaining if not trial.verdict]
        interrupted = [trial for trial in unfinished if trial.key in started_keys]
        for trial in interrupted or unfinished:
            trial.verdict = "failed"
            trial.why = outcome.reason or first_error(log, log_size)
            print(fold(f"{trial.name} failed: {trial.why}"), flush=True)


def import_ranks(configs: Sequence[Request]) -> ModuleType:
    """Import and return the module that the ranks run. Call this function before forking, so that
    the ranks share the imports."""
    launch.import_worker().use_cpu()
    importlib.import_module("torch._dynamo")  # optimizers import it later
    for config in configs:
        load_strategy(config).traits.load()
    return importlib.import_module("distributed_training.tools.parity.ranks")


def set_result(trial: Trial, line: Mapping[str, object] | None) -> None:
    """Copy a line of the results into `trial`. If `line` is None, leave `trial` unchanged."""
    if line is not None:
        for name in ("verdict", "why", "apart", "seconds", "mesh"):
            setattr(trial, name, line.get(name))
        trial.result = dict(line)


def first_error(log: Path, offset: int) -> str:
    """Search `log` after the first `offset` bytes. Return the line with the first exception that
    was not caused by a lost peer. If every exception was caused by a lost peer, return the first
    exception. If there is no exception, return the last line."""
    with open(log, encoding="utf-8", errors="replace") as file:
        file.seek(offset)
        lines = [line.strip() for line in file if line.strip()]
    errors = [line for line in lines if "Error" in line.partition(":")[0]]
    causes = [line for line in errors if " peer" not in line]
    return next(
        iter([*causes, *errors, *lines[-1:]]), "Its processes ended without an error message."
    )
