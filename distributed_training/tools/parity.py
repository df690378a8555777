"""Whether every layout computes what one process computes.

The reference is one process that compiles nothing. It trains twice, the second time with other
micro-batches: what it then differs from itself by is rounding. A layout that differs by more than
LIMITS, and by more than SPREADS times that, computes something else. Each tensor is held against
its own rounding, as Adam makes large steps of gradients that are nothing else.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from distributed_training.plan.mesh import OPEN
from distributed_training.records import page
from distributed_training.records.comparison import NOTHING, Table, differing
from distributed_training.records.display import WIDTH, short_path
from distributed_training.records.provenance import provenance
from distributed_training.records.record import METRICS_FILE, plural, write_json
from distributed_training.run.saving.resume import CHECKPOINTS, list_checkpoints
from distributed_training.settings.config import AUTO, KEYS
from distributed_training.settings.errors import UserError
from distributed_training.settings.strategies import list_strategies
from distributed_training.tools import compare

# Relative differences that sums in another order make in fp32, with room.
LIMITS = {"loss": 1e-5, "gradient norm": 1e-4, "weights": 1e-3}
SPREADS = 4
TINY = 1e-30  # to divide by
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


Figures = dict[str, dict[str, float | None]]  # what of LIMITS -> where -> number
Apart = dict[str, dict[str, float]]  # the same, relative differences


@dataclass(kw_only=True, slots=True)
class Outcome(compare.Run):
    """A run and what it computed."""

    verdict: str = ""
    apart: Apart = field(default_factory=dict)  # from the reference

    @property
    def folder(self) -> Path:
        assert self.record is not None
        return Path(self.record.run_dir)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `parity` takes besides CONFIG's keys."""
    add = parser.add_argument
    add("plan", nargs="?", metavar="PLAN.json", help="layouts, as in results/plans/")
    add("--strategies", metavar="A,B", help="without a plan: separated by commas; default: all")
    add("--out", metavar="FOLDER", help="for parity.html and parity.json; default: in output_dir")
    parser.set_defaults(seeds=1, git_commit=None)


def run(arguments: argparse.Namespace, build: compare.Build, script: Path) -> int:
    """Train under every layout, then write the page; 1 where one computes something else."""
    if arguments.plan is None and arguments.strategies is None:
        arguments.strategies = ",".join(list_strategies())
    wanted = compare.plan_runs(arguments, build, script, USUALLY)
    if arguments.out is None:
        wanted.out = wanted.out.with_name(f"parity-x{wanted.num_processes}")
    outcomes = plan_outcomes(wanted)
    if arguments.dry_run:
        compare.print_commands(outcomes)
        return 0
    reference, again, *_ = outcomes

    def conclude(outcome: Outcome) -> str:
        if outcome.why and outcome.verdict:
            raise UserError("one process cannot train this", outcome.why)
        if outcome is not reference:
            judge(outcome, reference, again)
            _remove_checkpoints(wanted.out, but=reference.folder)
        return outcome.verdict

    try:
        compare.train_each(wanted, outcomes, conclude)
    finally:
        _remove_checkpoints(wanted.out)
        done = [outcome for outcome in outcomes if outcome.verdict]
        if len(done) > 2:
            write_page(wanted.out, done)
    return exit_code([outcome.verdict for outcome in outcomes])


def _remove_checkpoints(out: Path, but: Path | None = None) -> None:
    for folder in out.glob(f"runs/*/{CHECKPOINTS}"):
        if folder.parent != but:
            shutil.rmtree(folder)


def exit_code(verdicts: Sequence[str]) -> int:
    """0 where some layout computes the same and none computes something else."""
    return 0 if OK in verdicts and not set(BAD) & set(verdicts) else 1


def plan_outcomes(wanted: compare.Wanted) -> list[Outcome]:
    """One process twice, with the global batch of all, then every layout that is wanted."""
    first = next(run for run in wanted.runs if run.config is not None)
    config = first.config
    assert config is not None
    work = {name for name, key in KEYS.items() if key.work} | USUALLY.keys()
    values = {name: value for name, value in first.values.items() if name in work}
    values |= {**PLAIN, **_decided(first)}
    size = int(config.batch_size)
    other = 1 if size > 1 else wanted.num_processes
    sequences = size * config.grad_accum_steps * wanted.num_processes
    cut, again = ({"batch_size": n, "grad_accum_steps": sequences // n} for n in (size, other))
    found = [
        Outcome(name="one process", num_processes=1, verdict="reference", values=values | cut),
        Outcome(name="again, cut otherwise", num_processes=1, verdict="rounding",
                values=values | again),
    ]  # fmt: skip
    for name, run in zip(compare.names_of(wanted.runs), wanted.runs, strict=True):
        values = {**run.values, **_decided(run)}
        found.append(
            Outcome(name=name, num_processes=run.num_processes, values=values, why=run.why)
        )
    return found


def _decided(run: compare.Run) -> compare.Values:
    """What is decided here; fp32, unless CONFIG or the command line says otherwise."""
    is_open = run.config is not None and run.config.precision == AUTO
    return {**ALWAYS, "precision": "fp32"} if is_open else ALWAYS


def judge(outcome: Outcome, reference: Outcome, again: Outcome) -> None:
    """Say what a run differs by from the reference, and whether that is rounding."""
    if outcome.why:
        outcome.verdict = "failed" if outcome.record else "not run"
        return
    theirs = figures(reference)
    for what, ours in figures(outcome).items():
        both = ours | theirs[what]
        outcome.apart[what] = {w: _apart(ours.get(w), theirs[what].get(w)) for w in both}
    outcome.apart["weights"] = dict(_apart_in_state(outcome, reference))
    works = [run.record.work for run in (outcome, reference) if run.record]
    if other := differing(works):
        outcome.verdict = "other work"
        outcome.why = f"by design, {', '.join(other)} being its own"
    elif outcome is not again:
        found = [_beyond(what, outcome, again) for what in LIMITS]
        outcome.why = "; ".join(filter(None, found))
        outcome.verdict = "differs" if outcome.why else OK


def _beyond(what: str, outcome: Outcome, again: Outcome) -> str:
    """Where a run differs most from the reference, by more than rounding; "" where it does not."""
    rounding = again.apart[what]
    if what != "weights":  # one step rounds as another does
        rounding = dict.fromkeys(rounding, max(rounding.values()))
    sizes = outcome.apart[what]
    limits = {where: max(LIMITS[what], SPREADS * rounding.get(where, 0.0)) for where in sizes}
    worst = max(sizes, key=lambda where: sizes[where] / limits[where])
    if sizes[worst] <= limits[worst]:
        return ""
    return f"{worst} by {sizes[worst]:.1e}, where rounding is {limits[worst]:.1e} at most"


def figures(run: Outcome) -> Figures:
    """What the steps and evaluations of a run say; None: not finite or skipped."""
    assert run.record is not None
    lines = (run.folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    losses = {f"loss of step {row['step']}": row["loss"] for row in steps}
    for row in run.record.evaluations:
        losses[f"loss of the evaluation after step {row['step']}"] = row["loss"]
    norms = {f"gradient norm of step {row['step']}": row["grad_norm"] for row in steps}
    return {"loss": losses, "gradient norm": norms}


def _apart(one: float | None, other: float | None) -> float:
    """Relative difference; what is not finite is like nothing else."""
    if one is not None and other:
        return abs(one - other) / other
    return 0.0 if one == other else math.inf


def _apart_in_state(outcome: Outcome, reference: Outcome) -> Iterator[tuple[str, float]]:
    """Of each tensor of the last checkpoints, whatever layout saved it, by the norm: the weights
    and, as Adam's steps hardly depend on a gradient's size, its means of gradients and squares."""
    import torch  # slow

    from distributed_training.parallel.tensor_files import TensorFiles

    files = []
    for run in (outcome, reference):
        (folder,) = list_checkpoints(run.folder)
        files.append(TensorFiles(sorted(folder.glob("*.safetensors"))))
    ours, theirs = files
    for name in sorted(ours.stored.keys() | theirs.stored.keys()):
        if not name.startswith(STATE):
            continue
        apart = math.inf  # only one of both has it
        if name in ours.stored and name in theirs.stored:
            one = ours.whole(name)
            other = theirs.whole(name)
            size = max(float(torch.linalg.vector_norm(other)), TINY)
            apart = float(torch.linalg.vector_norm(one - other)) / size
        yield (name, apart)


def write_page(out: Path, outcomes: Sequence[Outcome]) -> None:
    """parity.json, parity.html, and the table on the screen."""
    reference = outcomes[0].record
    assert reference is not None
    layouts = outcomes[2:]
    bad = [outcome.name for outcome in layouts if outcome.verdict in BAD]
    good = sum(outcome.verdict == OK for outcome in layouts)
    heading = f"{good} of {plural(len(layouts), 'layout')} compute what one process computes."
    if bad:
        heading += f" These do not: {', '.join(bad)}."
    config = reference.config
    words = [f"{key} {config[key]}" for key in ("model", "dataset", "precision")]
    title = (
        f"{', '.join(words)}; {reference.num_steps} steps of {reference.batch.global_batch_size} x "
        f"{config['max_length']} tokens; {layouts[0].num_processes} processes on "
        f"{reference.machine['gpu_name'] or 'CPU'}"
    )
    least = ", ".join(f"{what} {limit:g}" for what, limit in LIMITS.items())
    rule = (
        "Largest relative difference from one process, of all steps, of all tensors of weights and "
        f"of AdamW's state. Rounding is up to {SPREADS} times what one process differs by from "
        f"itself with other micro-batches, each tensor by itself, and in any case {least}."
    )
    notes = [f"{each.name} {each.verdict}: {each.why}" for each in layouts if each.why]
    headers = ["layout", *LIMITS, "seconds", "verdict"]
    rows = [_row(outcome) for outcome in outcomes]
    table = Table(title="Differences", about=rule, headers=headers, rows=rows)
    about = provenance(shlex.join(["python", *sys.argv]))
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    source = f"{about['command']}; {about['made_at']}; commit {about['git_commit']}; {versions}"
    section = page.Section(title, notes, [table])
    text = page.html("Parity of layouts", heading, [section], source)
    (out / "parity.html").write_text(text, encoding="utf-8")
    runs = [
        {"name": each.name, "set": each.values, "verdict": each.verdict, "why": each.why,
         "mesh": each.record and each.record.mesh, "seconds": each.seconds, "apart": each.apart}
        for each in outcomes
    ]  # fmt: skip
    found = {"heading": heading, "rule": rule, "config": config, "machine": reference.machine}
    write_json(out / "parity.json", {**about, **found, "runs": runs})
    texts = [textwrap.fill(text, WIDTH) for text in (title, *notes, heading)]
    texts.insert(1, page.plain(table, WIDTH))
    print("", *texts, f"wrote {short_path(out)}/parity.html and parity.json", sep="\n")


def _row(outcome: Outcome) -> list[str]:
    sizes = [f"{max(apart.values()):.1e}" for apart in outcome.apart.values()]
    sizes = sizes or [NOTHING] * len(LIMITS)
    return [outcome.name, *sizes, f"{outcome.seconds:.0f}", outcome.verdict]
