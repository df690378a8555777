"""Train under one layout after the other in one process group of `parity`, and compare each with
the reference, which a group of one process trained before.

A job file is JSON: {"runs": {key: {CONFIG key: value}}, "names": {key: name}, "out": folder,
"progress": [number of runs before these, number of all runs]}. For each run, rank 0 adds a line
{"began": key} to the results file before the run starts and a line {"key": key, ...} after it ends.
From these lines the launching process knows which run ended the group."""

import json
import math
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch

from distributed_training.parallel.tensor_files import TensorFiles
from distributed_training.records import metrics
from distributed_training.records.display import WIDTH, Display
from distributed_training.records.folder import list_checkpoints
from distributed_training.records.tables import differing
from distributed_training.settings.config import Request
from distributed_training.settings.errors import UserError
from distributed_training.settings.machine import threads_per_process
from distributed_training.supervise import claims
from distributed_training.tools import harness
from distributed_training.tools.parity.apart import OneByOne
from distributed_training.tools.parity.trials import (
    AGAIN,
    APART,
    DEQUANTIZED,
    NOT_PACKED,
    OK,
    REFERENCE,
)
from distributed_training.train.loop import Trainer

# Relative differences caused by summing in another order in fp32, with a margin.
LIMITS = {"loss": 1e-5, "gradient norm": 1e-4, "weights": 1e-3}
SPREADS = 4
STATE = ("weight/", "exp_avg/", "exp_avg_sq/")  # prefixes of the compared tensors of a checkpoint
RESULTS, LOG, RUNS = "runs/results.jsonl", "log.txt", "runs"
Values = dict[str, Any]
Build = Callable[[Sequence[str]], Request]
Apart = dict[str, dict[str, float]]  # quantity -> step or tensor -> relative difference


@dataclass(frozen=True)
class Rows(metrics.Tracker):
    """A tracker that keeps the rows of all steps."""

    steps: list[Values] = field(default_factory=list)

    def log_step(self, row: Values) -> None:
        self.steps.append(row)


def train_all(file: Path, build: Build) -> int:
    """Do the jobs of a file as one rank of the process group. Return the exit code. Collective over
    all processes."""
    jobs = json.loads(file.read_text(encoding="utf-8"))
    out = Path(jobs["out"])
    screen = os.fdopen(os.dup(1), "w")
    log = os.open(out / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):  # libraries print to both
        os.dup2(log, stream)
    configs = {key: build(as_texts(values)) for key, values in jobs["runs"].items()}
    names = {config.strategy for config in configs.values()}
    with harness.open_group_for({name: {"strategy": name} for name in names}) as group:
        torch.set_num_threads(threads_per_process(group.process.local_world_size))
        is_rank_0 = group.process.rank == 0
        kept = harness.Kept()
        for number, (key, config) in enumerate(configs.items(), jobs["progress"][0] + 1):
            line = f"{number:>3}/{jobs['progress'][1]}  {jobs['names'][key]}"
            began = time.monotonic()
            if is_rank_0:
                note(out, began=key)
                print(f"\n{line}", flush=True)  # goes to the log
            uses = {APART: _train_one_by_one, DEQUANTIZED: _train_dequantized}
            use = uses.get(key, _train)
            for _, results in harness.each_run(group, {key: config}, use, kept=kept):
                if is_rank_0:
                    result = conclude(key, results, out)
                    seconds = time.monotonic() - began
                    note(out, key=key, seconds=seconds, **result)
                    text = result["verdict"]
                    if text != "skipped":
                        text += f", {seconds:.0f} s"
                    if result["why"]:
                        text += f". {result['why']}"
                    show(screen, f"{line}: {text}")
    return 0


def as_texts(values: Values) -> list[str]:
    """Return the values as `key=value` texts for the command line."""
    return [f"{key}={value}" for key, value in values.items()]


def show(screen: TextIO, line: str) -> None:
    """Print one line about a run, wrapped below its name."""
    print(textwrap.fill(line, WIDTH, subsequent_indent=" " * 9), file=screen, flush=True)


def note(out: Path, **line: Any) -> None:
    """Append a line to the results file."""
    with open(out / RESULTS, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _train(run: harness.Run) -> Values:
    """Train with the usual loop, which saves a checkpoint after the last step. Return the losses,
    the gradient norms and the run's folder. Collective over all processes."""
    rows = Rows()
    trainer = Trainer(
        run.engine, run.plan, run.topology, run.data, run.sampler, Display(enabled=False),
        tracker=rows,
    )  # fmt: skip
    why = ""
    try:
        signum = trainer.run()
    except UserError as error:  # raised on every rank, for example if the loss is not finite
        signum = 0
        why = str(error)
    if run.topology.rank == 0:
        claims.release(run.plan.run_dir)
    if signum:
        sys.exit(128 + signum)
    losses = {f"loss of step {row['step']}": row["loss"] for row in rows.steps}
    for row in trainer.history.evaluations:
        losses[f"loss of the evaluation after step {row['step']}"] = row["loss"]
    norms = {f"gradient norm of step {row['step']}": row["grad_norm"] for row in rows.steps}
    plan = run.plan
    return {
        "why": why, "mesh": plan.mesh, "figures": [losses, norms], "run_dir": str(plan.run_dir),
        "work": {**plan.work, "data_fingerprint": run.data.fingerprint},
        "config": plan.settings, "num_steps": plan.num_steps,
        "global_batch_size": plan.batch.global_batch_size,
    }  # fmt: skip


def _train_one_by_one(run: harness.Run) -> Values:
    """Do `_train` with one packed record per row."""
    if run.data.train.firsts is None:
        return {"not_packed": True}
    run.sampler = OneByOne(**asdict(run.sampler))
    return _train(run)


def _train_dequantized(run: harness.Run) -> Values:
    """Do `_train` with frozen matrices in the compute dtype that have the values of NF4 ones."""
    from distributed_training.models.nf4 import replace_by_dequantized

    replace_by_dequantized(run.engine.parts)  # type: ignore[attr-defined]
    return _train(run)


def conclude(key: str, results: list[Any] | str, out: Path) -> Values:
    """Compare a run with the reference and remove its folder. Return its entry for parity.json.
    `results` are from `harness.each_run`."""
    if isinstance(results, str):
        return {"verdict": "skipped", "why": results, "apart": {}, "mesh": None}
    mine = results[0]
    if mine.get("not_packed"):
        return {"verdict": NOT_PACKED, "why": "", "apart": {}, "mesh": None}
    file = out / RUNS / f"{REFERENCE}.json"
    if key == REFERENCE and not mine["why"]:  # later runs need its folder
        file.write_text(json.dumps({REFERENCE: mine, AGAIN: {}}), encoding="utf-8")
        return {"verdict": REFERENCE, "why": "", "apart": {}, **mine}
    result = {"verdict": "failed", "why": mine["why"], "apart": {}, "mesh": mine["mesh"]}
    if not mine["why"]:
        known = json.loads(file.read_text(encoding="utf-8"))
        result["apart"] = compare(mine, known[REFERENCE])
        result["verdict"], result["why"] = AGAIN, ""
        if key == AGAIN:
            file.write_text(json.dumps({**known, AGAIN: result["apart"]}), encoding="utf-8")
        elif different_keys := differing([mine["work"], known[REFERENCE]["work"]]):
            result["verdict"] = "other work"
            result["why"] = f"This layout has its own {' and '.join(different_keys)}."
        else:
            result["verdict"], result["why"] = judge(result["apart"], known[AGAIN])
    shutil.rmtree(mine["run_dir"], ignore_errors=True)
    return result


def compare(mine: Values, reference: Values) -> Apart:
    """Return the relative differences between two runs in losses, gradient norms and tensors."""
    apart = {}
    # LIMITS also has the weights, which have no figures.
    figures = zip(LIMITS, mine["figures"], reference["figures"], strict=False)
    for quantity, ours, theirs in figures:
        apart[quantity] = {step: _apart(ours.get(step), theirs.get(step)) for step in ours | theirs}
    apart["weights"] = _apart_in_state(Path(mine["run_dir"]), Path(reference["run_dir"]))
    return apart


def judge(apart: Apart, again: Apart) -> tuple[str, str]:
    """Return the verdict on the differences `apart` from one process, and its reason. `again` holds
    the differences between the two runs of one process."""
    reasons = []
    for quantity, fixed_limit in LIMITS.items():
        differences = apart[quantity]
        rounding: Mapping[str, float] = again[quantity]
        if quantity != "weights":  # all steps have the rounding of the worst step
            rounding = dict.fromkeys(differences, max(again[quantity].values()))
        limits = {name: max(fixed_limit, SPREADS * rounding.get(name, 0.0)) for name in differences}
        worst = max(differences, key=lambda name: differences[name] / limits[name])
        if differences[worst] > limits[worst]:
            text = f"{worst} differs by {differences[worst]:.1e}, "
            text += f"and rounding explains at most {limits[worst]:.1e}."
            reasons.append(text[0].upper() + text[1:])
    return ("differs" if reasons else OK), " ".join(reasons)


def _apart(one: float | None, other: float | None) -> float:
    """Return the relative difference of two figures. A missing figure (None) makes it infinite."""
    if one is not None and other:
        return abs(one - other) / other
    return 0.0 if one == other else math.inf


def _apart_in_state(ours_dir: Path, theirs_dir: Path) -> dict[str, float]:
    """Return the relative difference, by norm, of each tensor of the last checkpoints. The tensors
    are the weights and the Adam moments, because Adam's steps hardly depend on the size of a
    gradient. Checkpoints of all layouts have the same tensors."""
    files = []
    for run_dir in (ours_dir, theirs_dir):
        (folder,) = list_checkpoints(run_dir)
        files.append(TensorFiles(sorted(folder.glob("*.safetensors"))))
    ours, theirs = files
    names = sorted(ours.stored.keys() | theirs.stored.keys())
    # Tensors that only one checkpoint has keep an infinite difference.
    differences = {name: math.inf for name in names if name.startswith(STATE)}
    for name in differences.keys() & ours.stored.keys() & theirs.stored.keys():
        other = theirs.whole(name)
        norm = max(float(torch.linalg.vector_norm(other)), 1e-30)  # never divide by 0
        differences[name] = float(torch.linalg.vector_norm(ours.whole(name) - other)) / norm
    return differences
