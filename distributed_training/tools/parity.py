"""Whether every layout computes what one process computes.

The reference is one process that compiles nothing. It trains twice, the second time with other
micro-batches: what it then differs from itself by is rounding. A layout that differs by more than
LIMITS, and by more than SPREADS times that, computes something else. Each tensor is held against
its own rounding, as Adam makes large steps of gradients that are nothing else."""

import argparse
import json
import math
import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from distributed_training.plan.layouts import OPEN
from distributed_training.records import report
from distributed_training.records.display import WIDTH, short_path
from distributed_training.records.record import METRICS_FILE, plural, provenance, write_json
from distributed_training.records.tables import NOTHING, Table, differing
from distributed_training.run.saving.resume import CHECKPOINTS, list_checkpoints
from distributed_training.settings.config import AUTO
from distributed_training.settings.errors import UserError
from distributed_training.settings.strategies import list_strategies
from distributed_training.tools import compare

# Relative differences that sums in another order make in fp32, with room.
LIMITS = {"loss": 1e-5, "gradient norm": 1e-4, "weights": 1e-3}
SPREADS = 4
STATE = ("weight/", "exp_avg/", "exp_avg_sq/")  # of a checkpoint
OK = "ok"
BAD = ("differs", "failed")
# Other masks are drawn under every layout.
ALWAYS: compare.Values = {"dropout": 0.0, "resume": None, "checkpoint_every": 2**31}
# Unless somebody says otherwise; a GPU replays a graph of the last steps.
USUALLY: compare.Values = {**compare.QUIETLY, "max_steps": 16, "eval_samples": 8}
PLAIN: compare.Values = {
    **OPEN, "strategy": "dp", "pipeline_schedule": AUTO, "compile": False, "cuda_graphs": False,
    "gradient_compression": "none",
}  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `parity` takes besides CONFIG's keys."""
    add = parser.add_argument
    add("plan", nargs="?", metavar="PLAN.json", help="layouts, as in results/plans/")
    add("--strategies", metavar="A,B", help="without a plan: separated by commas; default: all")
    add("--out", metavar="FOLDER", help="for parity.html and parity.json; default: in output_dir")
    parser.set_defaults(seeds=1)


def run(arguments: argparse.Namespace, build: compare.Build, script: Path) -> int:
    """Train under every layout, then write the page; 1 where one computes something else."""
    if arguments.plan is None and arguments.strategies is None:
        arguments.strategies = ",".join(list_strategies())
    layouts, out = compare.plan_runs(arguments, build, script, USUALLY)
    if arguments.out is None:
        out = out.with_name(f"parity-x{layouts[0].num_processes}")
    reference, again = references_for(layouts)
    runs = [reference, again, *layouts]
    if arguments.dry_run:
        compare.print_settings(runs)
        return 0

    def remove_checkpoints(*but: Path) -> None:
        for folder in {*out.glob(f"runs/[!l]*/{CHECKPOINTS}")} - {*but}:  # not through "latest"
            shutil.rmtree(folder)

    def conclude(run: compare.Run) -> str:
        if run.why and run.verdict:
            raise UserError("one process cannot train this", run.why)
        if run is not reference:
            judge(run, reference, again)
            remove_checkpoints(folder_of(reference) / CHECKPOINTS)
        return run.verdict

    try:
        compare.train_each(runs, out, conclude)
    finally:
        remove_checkpoints()
        done = [run for run in runs if run.verdict]
        if len(done) > 2:
            write_page(out, done)
    return exit_code([run.verdict for run in runs])


def folder_of(run: compare.Run) -> Path:
    """What it wrote."""
    assert run.record is not None
    return Path(run.record.run_dir)


def exit_code(verdicts: Sequence[str]) -> int:
    """0 where some layout computes the same and none computes something else."""
    return 0 if OK in verdicts and not set(BAD) & set(verdicts) else 1


def references_for(runs: Sequence[compare.Run]) -> list[compare.Run]:
    """One process with the global batch of all and their work, and the same cut otherwise; in fp32,
    as all runs, unless CONFIG or the command line says otherwise."""
    for run in runs:
        run.values |= ALWAYS
        if run.config is not None and run.config.precision == AUTO:
            run.values["precision"] = "fp32"
    first, config = next((run, run.config) for run in runs if run.config)
    kept = compare.WORK | USUALLY.keys() | ALWAYS.keys()
    plain = {name: value for name, value in first.values.items() if name in kept} | PLAIN
    size = int(config.batch_size)
    sequences = size * config.grad_accum_steps * first.num_processes
    other = 1 if size > 1 else first.num_processes
    found = []
    for name, verdict, micro in (
        ("one process", "reference", size), ("again, cut otherwise", "rounding", other),
    ):  # fmt: skip
        values = plain | {"batch_size": micro, "grad_accum_steps": sequences // micro}
        run = replace(first, name=name, verdict=verdict, values=values, num_processes=1, apart={})
        found.append(run)
    return found


def judge(run: compare.Run, reference: compare.Run, again: compare.Run) -> None:
    """Say what a run differs by from the reference, and whether that is rounding."""
    if run.why:
        run.verdict = run.status
        return
    for what, ours, theirs in zip(LIMITS, figures(run), figures(reference), strict=False):
        run.apart[what] = {w: _apart(ours.get(w), theirs.get(w)) for w in ours | theirs}
    run.apart["weights"] = _apart_in_state(run, reference)
    works = [each.record.work for each in (run, reference) if each.record]
    if other := differing(works):
        run.verdict = "other work"
        run.why = f"by design, {', '.join(other)} being its own"
    elif run is not again:
        beyond = []
        for what, least in LIMITS.items():
            sizes = run.apart[what]
            rounding = again.apart[what]
            if what != "weights":  # one step rounds as another does
                rounding = dict.fromkeys(sizes, max(rounding.values()))
            limits = {where: max(least, SPREADS * rounding.get(where, 0.0)) for where in sizes}
            worst = max(sizes, key=lambda where: sizes[where] / limits[where])
            if sizes[worst] > limits[worst]:
                text = f"{worst} by {sizes[worst]:.1e}, where rounding is {limits[worst]:.1e}"
                beyond.append(f"{text} at most")
        run.why = "; ".join(beyond)
        run.verdict = "differs" if beyond else OK


def figures(run: compare.Run) -> list[dict[str, float | None]]:
    """[losses, gradient norms] of a run's steps and evaluations; None: not finite or skipped."""
    assert run.record is not None
    lines = (folder_of(run) / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    losses = {f"loss of step {row['step']}": row["loss"] for row in steps}
    for row in run.record.evaluations:
        losses[f"loss of the evaluation after step {row['step']}"] = row["loss"]
    norms = {f"gradient norm of step {row['step']}": row["grad_norm"] for row in steps}
    return [losses, norms]


def _apart(one: float | None, other: float | None) -> float:
    """Relative difference; what is not finite is like nothing else."""
    if one is not None and other:
        return abs(one - other) / other
    return 0.0 if one == other else math.inf


def _apart_in_state(run: compare.Run, reference: compare.Run) -> dict[str, float]:
    """Of each tensor of the last checkpoints, whatever layout saved it, by the norm: the weights
    and, as Adam's steps hardly depend on a gradient's size, its means of gradients and squares."""
    from torch.linalg import vector_norm  # slow

    from distributed_training.parallel.tensor_files import TensorFiles

    files = []
    for each in (run, reference):
        (folder,) = list_checkpoints(folder_of(each))
        files.append(TensorFiles(sorted(folder.glob("*.safetensors"))))
    ours, theirs = files
    names = sorted(ours.stored.keys() | theirs.stored.keys())
    found = {name: math.inf for name in names if name.startswith(STATE)}  # unless both have it
    for name in found.keys() & ours.stored.keys() & theirs.stored.keys():
        other = theirs.whole(name)
        size = max(float(vector_norm(other)), 1e-30)  # to divide by
        found[name] = float(vector_norm(ours.whole(name) - other)) / size
    return found


def write_page(out: Path, runs: Sequence[compare.Run]) -> None:
    """parity.json, parity.html, and the table on the screen."""
    reference = runs[0].record
    assert reference is not None
    config = reference.config
    layouts = runs[2:]
    good = sum(run.verdict == OK for run in layouts)
    heading = f"{good} of {plural(len(layouts), 'layout')} compute what one process computes."
    if bad := [run.name for run in layouts if run.verdict in BAD]:
        heading += f" These do not: {', '.join(bad)}."
    title = (
        f"model {config['model']}, dataset {config['dataset']}, precision {config['precision']}; "
        f"{reference.num_steps} steps of {reference.batch.global_batch_size} x "
        f"{config['max_length']} tokens; {layouts[0].num_processes} processes on "
        f"{reference.machine['gpu_name'] or 'CPU'}"
    )
    least = ", ".join(f"{what} {limit:g}" for what, limit in LIMITS.items())
    rule = (
        "Largest relative difference from one process, of all steps, of all tensors of weights and "
        f"of AdamW's state. Rounding is up to {SPREADS} times what one process differs by from "
        f"itself with other micro-batches, each tensor by itself, and in any case {least}."
    )
    notes = [f"{run.name} {run.verdict}: {run.why}" for run in layouts if run.why]
    columns = {"layout": [run.name for run in runs]}
    for what in LIMITS:
        sizes = [run.apart.get(what) for run in runs]
        columns[what] = [f"{max(each.values()):.1e}" if each else NOTHING for each in sizes]
    columns["seconds"] = [f"{run.seconds:.0f}" for run in runs]
    columns["verdict"] = [run.verdict for run in runs]
    table = Table(title="Differences", about=rule, columns=columns)
    about = provenance(shlex.join(["python", *sys.argv]))
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    source = f"{about['command']}; {about['made_at']}; commit {about['git_commit']}; {versions}"
    section = report.Section(title, notes, [table])
    text = report.page("html", "Parity of layouts", heading, [section], source)
    (out / "parity.html").write_text(text, encoding="utf-8")
    found = [
        {"name": run.name, "set": run.values, "verdict": run.verdict, "why": run.why,
         "mesh": run.record and run.record.mesh, "seconds": run.seconds, "apart": run.apart}
        for run in runs
    ]  # fmt: skip
    about |= {"heading": heading, "rule": rule, "config": config, "machine": reference.machine}
    write_json(out / "parity.json", {**about, "runs": found})
    print(f"\n{report.terminal(section)}\n{textwrap.fill(heading, WIDTH)}")
    print(f"wrote {short_path(out)}/parity.html and parity.json")
