"""`parity`: whether every layout computes what one process computes, on one page to cite.

    python real_model_example.py parity --num_gpus 4 --strategies dp,fsdp,tp,pp
    python real_model_example.py parity --num_gpus 4 --precision bf16 PLAN.json

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
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from distributed_training.plan.mesh import OPEN
from distributed_training.records import page
from distributed_training.records.comparison import NOTHING, Table, differing
from distributed_training.records.display import WIDTH, short_path
from distributed_training.records.provenance import provenance
from distributed_training.records.record import METRICS_FILE, load_record, plural, write_json
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


Apart = dict[str, dict[str, float]]  # what of LIMITS -> where -> relative difference


@dataclass(kw_only=True, slots=True)
class Outcome(compare.Run):
    """A run and what it computed."""

    name: str
    num_processes: int
    verdict: str = ""
    seconds: float = 0.0
    folder: Path | None = None  # None: it did not start
    apart: Apart = field(default_factory=dict)  # from the reference


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
        print("\n".join(f"  {' '.join(outcome.texts)}" for outcome in outcomes))
        return 0
    wanted.out.mkdir(parents=True, exist_ok=True)
    print(f"what runs print goes to {short_path(wanted.out)}/log.txt", flush=True)
    reference, again, *_ = outcomes
    try:
        for number, outcome in enumerate(outcomes, 1):
            place = f"{number:>3}/{len(outcomes)}  {outcome.name}"
            print(f"{place} ...", flush=True)
            began = time.monotonic()
            if not outcome.why:
                outcome.folder, outcome.why = compare.launch(
                    wanted, outcome.texts, outcome.num_processes
                )
            outcome.seconds = time.monotonic() - began
            outcome.record = load_record(outcome.folder) if outcome.folder else None
            if outcome.why and outcome.verdict:
                raise UserError("one process cannot train this", outcome.why)
            if outcome is not reference:
                judge(outcome, reference, again)
                shutil.rmtree((outcome.folder or wanted.out) / CHECKPOINTS, ignore_errors=True)
            print(f"{place}: {outcome.verdict}", flush=True)
    except KeyboardInterrupt:
        if outcomes[2].verdict:
            write_page(wanted.out, [outcome for outcome in outcomes if outcome.verdict])
        raise
    finally:
        for folder in wanted.out.glob(f"runs/*/{CHECKPOINTS}"):
            shutil.rmtree(folder)
    write_page(wanted.out, outcomes)
    return exit_code([outcome.verdict for outcome in outcomes])


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
            Outcome(name=name, num_processes=wanted.num_processes, values=values, why=run.why)
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
    outcome.apart = {
        **_apart_in_figures(outcome, reference),
        "weights": dict(_apart_in_state(outcome, reference)),
    }
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


def _apart_in_figures(run: Outcome, reference: Outcome) -> Apart:
    """Of losses and gradient norms; None, not finite or skipped, is like None only."""
    apart: Apart = {"loss": {}, "gradient norm": {}}
    ours = _figures(run)
    theirs = _figures(reference)
    for what, where in ours | theirs:
        one = ours.get((what, where))
        other = theirs.get((what, where))
        size = 0.0 if one == other else math.inf
        if one is not None and other:
            size = abs(one - other) / other
        apart[what][f"{what} of {where}"] = size
    return apart


def _figures(run: Outcome) -> dict[tuple[str, str], float | None]:
    """What the steps and evaluations of a run say: (what, where) -> number."""
    assert run.folder is not None
    assert run.record is not None
    found: dict[tuple[str, str], float | None] = {}
    for line in (run.folder / METRICS_FILE).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found["loss", f"step {row['step']}"] = row["loss"]
        found["gradient norm", f"step {row['step']}"] = row["grad_norm"]
    for row in run.record.evaluations:
        found["loss", f"the evaluation after step {row['step']}"] = row["loss"]
    return found


def _apart_in_state(run: Outcome, reference: Outcome) -> Iterator[tuple[str, float]]:
    """Of each tensor of the last checkpoints, whatever layout saved it, by the norm: the weights
    and, as Adam's steps hardly depend on a gradient's size, its means of gradients and squares."""
    import torch  # slow

    from distributed_training.parallel.tensor_files import TensorFiles

    files = []
    for each in (run, reference):
        assert each.folder is not None
        (folder,) = list_checkpoints(each.folder)
        files.append(TensorFiles(sorted(folder.glob("*.safetensors"))))
    names = [{name for name in each.stored if name.startswith(STATE)} for each in files]
    for name in sorted(names[0] | names[1]):
        apart = math.inf  # only one of both has it
        if all(name in each for each in names):
            one, other = (each.whole(name) for each in files)
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
