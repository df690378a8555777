"""Whether every layout computes what one process computes.

The reference is one process that compiles nothing. It trains twice, the second time with other
micro-batches: its differences from itself are rounding. A layout that differs by more than LIMITS,
and by more than SPREADS times the rounding, computes something else. Each tensor is compared with
its own rounding, as Adam makes large steps of gradients that are nothing else.

Two process groups train everything: one process, then the processes of the layouts. Starting
processes takes longer than the steps."""

import argparse
import importlib
import json
import math
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType

from distributed_training.models import find_model
from distributed_training.plan.choose import choose_model
from distributed_training.plan.layouts import OPEN
from distributed_training.records import report
from distributed_training.records.display import WIDTH, duration, last_part, short_path
from distributed_training.records.record import plural, provenance, write_json
from distributed_training.records.tables import NOTHING, Table
from distributed_training.run import launch
from distributed_training.run.ranks import current_process, run_ranks
from distributed_training.settings.config import AUTO, RunConfig
from distributed_training.settings.errors import UserError
from distributed_training.settings.machine import Machine, detect_machine
from distributed_training.settings.strategies import list_strategies, load_strategy
from distributed_training.tools import compare

OK, REFERENCE, AGAIN = "ok", "reference", "rounding"  # as in parity_ranks.py
BAD = ("differs", "failed")
# Other dropout masks are drawn under every layout.
ALWAYS: compare.Values = {"dropout": 0.0, "resume": None, "checkpoint_every": 2**31}
# Unless somebody says otherwise; a GPU replays a graph of the last steps.
USUALLY: compare.Values = {**compare.QUIETLY, "max_steps": 16, "eval_samples": 8}
PLAIN: compare.Values = {
    **OPEN, "strategy": "dp", "pipeline_schedule": AUTO, "compile": False, "cuda_graphs": False,
    "gradient_compression": "none",
}  # fmt: skip
LAYOUT_S = 6.0  # to build an engine, save and compare; an upper bound of small models


@dataclass(kw_only=True, slots=True)
class Trial:
    """One training of the certificate and its result."""

    key: str
    name: str
    values: compare.Values
    num_processes: int
    verdict: str = ""  # "": not trained yet
    why: str = ""
    apart: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds: float = 0.0
    mesh: dict[str, int] | None = None
    about: compare.Values = field(default_factory=dict)  # of the reference: CONFIG and steps


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
        from distributed_training.tools import parity_ranks

        return parity_ranks.train_all(arguments.jobs, build)
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
    out.mkdir(parents=True, exist_ok=True)
    runs_dir = out / "runs"
    shutil.rmtree(runs_dir, ignore_errors=True)
    runs_dir.mkdir()
    for trial in trials:
        trial.values["output_dir"] = str(runs_dir.absolute())
    say_how_long(wanted, trials, build, out)
    group = partial(train_group, trials=trials, out=out, build=build, script=script)
    try:
        group(trials[:2], can_fork=launch.can_fork(machine))
        if why := trials[0].why or trials[1].why:
            raise UserError("one process cannot train this", why)
        group(trials[2:], can_fork=launch.can_fork(machine))
    finally:
        shutil.rmtree(runs_dir, ignore_errors=True)
        done = [trial for trial in trials if trial.verdict]
        if len(done) > 2:
            write_page(out, done, machine)
    return exit_code([trial.verdict for trial in trials])


def exit_code(verdicts: Sequence[str]) -> int:
    """0 if some layout computes the same and none computes something else."""
    return 0 if OK in verdicts and not set(BAD) & set(verdicts) else 1


def share_model(runs: Sequence[compare.Run], machine: Machine) -> None:
    """Give all runs the "auto" model with the most blocks that one of them needs, and fp32 unless
    CONFIG or the command line says otherwise."""
    models = []
    for run in runs:
        if run.config is not None:
            chosen = choose_model(run.config, machine, run.num_processes, []).model
            models.append((find_model(chosen).size.num_layers, chosen))
    for run in runs:
        run.values |= ALWAYS
        if run.config is not None and run.config.model == AUTO:
            run.values["model"] = max(models)[1]
        if run.config is not None and run.config.precision == AUTO:
            run.values["precision"] = "fp32"


def layouts_of(runs: Sequence[compare.Run]) -> list[Trial]:
    """A trial per layout; one that its CONFIG refuses is skipped already."""
    return [
        Trial(
            key=f"layout-{number}", name=run.name, values=run.values, why=run.why,
            verdict="skipped" if run.why else "", num_processes=run.num_processes,
        )
        for number, run in enumerate(runs)
    ]  # fmt: skip


def references_for(runs: Sequence[compare.Run]) -> list[Trial]:
    """One process with the global batch and the work of all layouts, and the same with other
    micro-batches."""
    first, config = next((run, run.config) for run in runs if run.config)
    kept = compare.WORK | USUALLY.keys() | ALWAYS.keys() | {"precision"}
    plain = {name: value for name, value in first.values.items() if name in kept} | PLAIN
    size = int(config.batch_size)
    sequences = size * config.grad_accum_steps * first.num_processes
    other = 1 if size > 1 else first.num_processes
    found = []
    for key, name, micro in (
        (REFERENCE, "one process", size), (AGAIN, "again, cut otherwise", other),
    ):  # fmt: skip
        values = plain | {"batch_size": micro, "grad_accum_steps": sequences // micro}
        found.append(Trial(key=key, name=name, values=values, num_processes=1))
    return found


def say_how_long(
    runs: Sequence[compare.Run], trials: Sequence[Trial], build: compare.Build, out: Path
) -> None:
    """Print the work and a prediction of its time."""
    layouts, processes = trials[2:], trials[2].num_processes
    steps = [(build(compare.texts(trial.values)), trial.num_processes) for trial in trials
             if not trial.verdict]  # fmt: skip
    seconds = compare.predicted_s(steps, run_s=LAYOUT_S)
    print(
        f"{plural(len(layouts), 'layout')} of {plural(processes, 'process')} against one process: "
        f"{duration(seconds)}; libraries' output goes to {short_path(out)}/log.txt",
        flush=True,
    )


def train_group(
    wanted: Sequence[Trial], *, trials: Sequence[Trial], out: Path, build: compare.Build,
    script: Path, can_fork: bool,
) -> None:  # fmt: skip
    """Let one group of processes do the `wanted` trials. If a trial ends the group, another group
    does the remaining ones. Raises KeyboardInterrupt if the groups were told to stop."""
    jobs_file, results = out / "jobs.json", out / "results.jsonl"
    count = wanted[0].num_processes
    what: list[str] | Callable[[], int] = [str(script), *sys.argv[1:], f"--jobs={jobs_file}"]
    if can_fork:
        launch.prepare_environment(count)
        parity_ranks = import_ranks(
            [build(compare.texts(trial.values)) for trial in wanted if not trial.verdict]
        )
        what = partial(parity_ranks.train_all, jobs_file, build)
    while left := [trial for trial in wanted if not trial.verdict]:
        jobs = {
            "runs": {trial.key: trial.values for trial in left},
            "names": {trial.key: trial.name for trial in left},
            "place": [sum(bool(trial.verdict) for trial in trials), len(trials)],
            "out": str(out),
        }
        write_json(jobs_file, jobs)
        results.unlink(missing_ok=True)
        log = out / "log.txt"
        place = log.stat().st_size if log.is_file() else 0
        ended = run_ranks(what, count)
        lines = [json.loads(text) for text in results.read_text().splitlines()]
        found = {line["key"]: line for line in lines if "key" in line}
        for trial in left:
            take(trial, found.get(trial.key))
        if ended.signum:
            raise KeyboardInterrupt
        if any(not trial.verdict for trial in left):
            began = [line["began"] for line in lines if "began" in line]
            lost = next((trial for trial in left if trial.key == (began or [""])[-1]), left[0])
            lost.verdict = "failed"
            lost.why = ended.reason or first_error(log, place)
            print(textwrap.fill(f"{lost.name} failed: {lost.why}", WIDTH), flush=True)
    jobs_file.unlink(missing_ok=True)
    results.unlink(missing_ok=True)


def import_ranks(configs: Sequence[RunConfig]) -> ModuleType:
    """Import before the fork what each rank would import by itself."""
    launch.import_worker().use_cpu()
    importlib.import_module("torch._dynamo")  # which optimizers import
    for config in configs:
        load_strategy(config).traits.load()
    return importlib.import_module("distributed_training.tools.parity_ranks")


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


def summary(trials: Sequence[Trial]) -> list[str]:
    """The result in a sentence, then a line with the reason of each layout that does not agree."""
    names: dict[str, list[str]] = {}
    for trial in trials:
        names.setdefault(trial.verdict, []).append(trial.name)
    text = f"{len(names.get(OK, ()))} of {plural(len(trials), 'layout')} agree with one process"
    for verdict, words in (
        ("differs", "differing"), ("failed", "failed"), ("skipped", "skipped"),
        ("other work", "not comparable by design"),
    ):  # fmt: skip
        if found := names.get(verdict):
            text += f", {len(found)} {words} ({', '.join(found)})"
    return [f"{text}.", *(f"{trial.name} {in_words(trial)}" for trial in trials if trial.why)]


def in_words(trial: Trial) -> str:
    """Verdict and reason."""
    return f"{trial.verdict} because {trial.why}" if trial.why else trial.verdict


def write_page(out: Path, trials: Sequence[Trial], machine: Machine) -> None:
    """parity.json, parity.html, and the table on the screen."""
    from distributed_training.tools.parity_ranks import LIMITS, SPREADS

    reference, layouts = trials[0].about, trials[2:]
    config = reference["config"]
    heading, *notes = summary(layouts)
    title = (
        f"model {config['model']}, dataset {config['dataset']}, precision {config['precision']}; "
        f"{reference['num_steps']} steps of {reference['global_batch_size']} x "
        f"{config['max_length']} tokens; {layouts[0].num_processes} processes on "
        f"{machine.gpu_name or 'CPU'}"
    )
    least = ", ".join(f"{limit:g} for {what}" for what, limit in LIMITS.items())
    rule = (
        "Largest relative difference from one process over all steps and over all tensors of "
        "weights and of AdamW's state. Tolerance: the larger of a fixed limit "
        f"({least}) and {SPREADS} times the difference between the two runs of one process."
    )
    columns = {"layout": [trial.name for trial in trials]}
    for what in LIMITS:
        sizes = [max(trial.apart.get(what, {}).values(), default=math.inf) for trial in trials]
        columns[what] = [f"{size:.1e}" if size < math.inf else NOTHING for size in sizes]
    columns["seconds"] = [f"{trial.seconds:.0f}" for trial in trials]
    columns["verdict"] = [trial.verdict for trial in trials]
    table = Table(title="Differences", about=rule, columns=columns)
    about = provenance(shlex.join(["python", *sys.argv]))
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    source = f"{about['command']}; {about['made_at']}; commit {about['git_commit']}; {versions}"
    settings = {
        "dataset": last_part(config["dataset"]), "precision": config["precision"],
        "steps": f"{reference['num_steps']} of {reference['global_batch_size']} x "
                 f"{config['max_length']} tokens",
        "processes": str(layouts[0].num_processes), "device": machine.gpu_name or "CPU",
    }  # fmt: skip
    model = last_part(config["model"])
    section = report.Section(title, notes, [table], heading=model, settings=settings)
    text = report.page("html", "Parity of layouts", heading, [section], source)
    (out / "parity.html").write_text(text, encoding="utf-8")
    found = [
        {"name": trial.name, "set": trial.values, "verdict": trial.verdict, "why": trial.why,
         "mesh": trial.mesh, "seconds": trial.seconds, "apart": trial.apart}
        for trial in trials
    ]  # fmt: skip
    about |= {"heading": heading, "rule": rule, "config": config}
    about |= {"machine": machine, "limits": LIMITS, "spreads": SPREADS}
    write_json(out / "parity.json", {**about, "runs": found})
    print(f"\n{report.terminal(section)}\n{textwrap.fill(rule, WIDTH)}")
    print(textwrap.fill(heading, WIDTH))
    print(f"wrote {short_path(out)}/parity.html and parity.json")
