"""Perform training runs for `parity` one after another in a process group. Compare each run with
the reference, which a single process has already trained.

A job file is a JSON file with this form:

    {"runs": {key: {CONFIG key: value}}, "names": {key: name}, "out": folder,
     "progress": [number of earlier runs, total number of runs]}

Rank 0 adds the line `{"began": key}` to the results file before each run, and the line
`{"key": key, ...}` after the run. If the group exits early, these lines tell the launching process
which run was in progress."""

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
from distributed_training.records.tables import differing_keys
from distributed_training.settings.config import Request
from distributed_training.settings.errors import UserError
from distributed_training.settings.machine import threads_per_process
from distributed_training.settings.request import format_overrides
from distributed_training.supervise import claims
from distributed_training.tools import harness
from distributed_training.tools.parity.trials import (
    DEQUANTIZED,
    NOT_PACKED,
    OK,
    ONE_BY_ONE,
    REFERENCE,
    ROUNDING,
)
from distributed_training.tools.parity.unpack import OneByOneSampler
from distributed_training.train.loop import Trainer

# Relative differences that another order of summation in fp32 can cause, with a margin
LIMITS = {"loss": 1e-5, "gradient norm": 1e-4, "weights": 1e-3}
ROUNDING_FACTOR = 4
STATE = ("weight/", "exp_avg/", "exp_avg_sq/")  # prefixes of the compared tensors in a checkpoint
RESULTS, LOG, RUNS = "runs/results.jsonl", "log.txt", "runs"
Values = dict[str, Any]
Build = Callable[[Sequence[str]], Request]
Differences = dict[str, dict[str, float]]  # quantity -> step or tensor -> relative difference


@dataclass(frozen=True)
class StepRecorder(metrics.Tracker):
    """Tracker that keeps the values of all steps in memory."""

    steps: list[Values] = field(default_factory=list)

    def log_step(self, row: Values) -> None:
        self.steps.append(row)


def train_all(file: Path, build: Build) -> int:
    """Perform the runs that the job file `file` lists. Return the exit code. All ranks must call
    this function."""
    jobs = json.loads(file.read_text(encoding="utf-8"))
    out = Path(jobs["out"])
    screen = os.fdopen(os.dup(1), "w")
    log = os.open(out / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):  # libraries print to both streams
        os.dup2(log, stream)
    configs = {key: build(format_overrides(values)) for key, values in jobs["runs"].items()}
    names = {config.strategy for config in configs.values()}
    with harness.open_group_for({name: {"strategy": name} for name in names}) as group:
        torch.set_num_threads(threads_per_process(group.process.local_world_size))
        is_rank_0 = group.process.rank == 0
        run_cache = harness.RunCache()
        for number, (key, config) in enumerate(configs.items(), jobs["progress"][0] + 1):
            line = f"{number:>3}/{jobs['progress'][1]}  {jobs['names'][key]}"
            start = time.monotonic()
            if is_rank_0:
                write_result(out, began=key)
                print(f"\n{line}", flush=True)  # this line goes to the log
            use_by_key = {ONE_BY_ONE: _train_one_by_one, DEQUANTIZED: _train_dequantized}
            use = use_by_key.get(key, _train)
            for _, results in harness.each_run(group, {key: config}, use, run_cache=run_cache):
                if is_rank_0:
                    result = conclude(key, results, out)
                    seconds = time.monotonic() - start
                    write_result(out, key=key, seconds=seconds, **result)
                    text = result["verdict"]
                    if text != "skipped":
                        text += f", {seconds:.0f} s"
                    if result["why"]:
                        text += f". {result['why']}"
                    print_status(screen, f"{line}: {text}")
    return 0


def print_status(screen: TextIO, line: str) -> None:
    """Print `line`, wrapped to the width of the screen. Continuation lines are indented below the
    run's name."""
    print(textwrap.fill(line, WIDTH, subsequent_indent=" " * 9), file=screen, flush=True)


def write_result(out: Path, **line: Any) -> None:
    """Append a line to the results file."""
    with open(out / RESULTS, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _train(run: harness.Run) -> Values:
    """Train with the usual loop, which saves a checkpoint after the last step. Return the losses,
    the gradient norms, the run's folder and other values for `conclude`. All ranks must call this
    function."""
    recorder = StepRecorder()
    trainer = Trainer(
        run.engine, run.plan, run.topology, run.data, run.sampler, Display(enabled=False),
        tracker=recorder,
    )  # fmt: skip
    why = ""
    try:
        signum = trainer.run()
    except UserError as error:  # every rank raises it, for example if the loss is not finite
        signum = 0
        why = str(error)
    if run.topology.rank == 0:
        claims.release(run.plan.run_dir)
    if signum:
        sys.exit(128 + signum)
    losses = {f"loss of step {row['step']}": row["loss"] for row in recorder.steps}
    for row in trainer.history.evaluations:
        losses[f"loss of the evaluation after step {row['step']}"] = row["loss"]
    norms = {f"gradient norm of step {row['step']}": row["grad_norm"] for row in recorder.steps}
    plan = run.plan
    return {
        "why": why, "mesh": plan.mesh, "figures": [losses, norms], "run_dir": str(plan.run_dir),
        "work": {**plan.work, "data_fingerprint": run.data.fingerprint},
        "config": plan.settings, "num_steps": plan.num_steps,
        "global_batch_size": plan.batch.global_batch_size,
    }  # fmt: skip


def _train_one_by_one(run: harness.Run) -> Values:
    """Call `_train` with one packed record per row."""
    if run.data.train.firsts is None:
        return {"not_packed": True}
    run.sampler = OneByOneSampler(**asdict(run.sampler))
    return _train(run)


def _train_dequantized(run: harness.Run) -> Values:
    """Call `_train` after replacing the frozen NF4 matrices with their dequantized values in the
    compute dtype."""
    from distributed_training.models.nf4 import dequantize_in_place

    dequantize_in_place(run.engine.stages)  # type: ignore[attr-defined]
    return _train(run)


def conclude(key: str, results: list[Any] | str, out: Path) -> Values:
    """Compare a run with the reference and remove the run's folder. Return the run's entry for
    parity.json. `results` comes from `harness.each_run`."""
    if isinstance(results, str):
        return {"verdict": "skipped", "why": results, "apart": {}, "mesh": None}
    entry = results[0]
    if entry.get("not_packed"):
        return {"verdict": NOT_PACKED, "why": "", "apart": {}, "mesh": None}
    file = out / RUNS / f"{REFERENCE}.json"
    if key == REFERENCE and not entry["why"]:  # later runs need the folder of the reference
        file.write_text(json.dumps({REFERENCE: entry, ROUNDING: {}}), encoding="utf-8")
        return {"verdict": REFERENCE, "why": "", "apart": {}, **entry}
    result = {"verdict": "failed", "why": entry["why"], "apart": {}, "mesh": entry["mesh"]}
    if not entry["why"]:
        references = json.loads(file.read_text(encoding="utf-8"))
        result["apart"] = compare(entry, references[REFERENCE])
        result["verdict"], result["why"] = ROUNDING, ""
        if key == ROUNDING:
            file.write_text(json.dumps({**references, ROUNDING: result["apart"]}), encoding="utf-8")
        elif different_keys := differing_keys([entry["work"], references[REFERENCE]["work"]]):
            result["verdict"] = "other work"
            result["why"] = f"It uses different values for these keys: {', '.join(different_keys)}."
        else:
            result["verdict"], result["why"] = judge(result["apart"], references[ROUNDING])
    shutil.rmtree(entry["run_dir"], ignore_errors=True)
    return result


def compare(entry: Values, reference: Values) -> Differences:
    """Return the relative differences in losses, gradient norms and tensors between two runs."""
    differences = {}
    # `figures` has no entry for the weights, the last key of LIMITS.
    figures = zip(LIMITS, entry["figures"], reference["figures"], strict=False)
    for quantity, values, reference_values in figures:
        differences[quantity] = {
            step: _relative_difference(values.get(step), reference_values.get(step))
            for step in values | reference_values
        }
    differences["weights"] = _state_differences(Path(entry["run_dir"]), Path(reference["run_dir"]))
    return differences


def judge(layout_differences: Differences, rounding_differences: Differences) -> tuple[str, str]:
    """Return (verdict, reason) for a layout. `layout_differences` contains the differences between
    the layout and the reference. `rounding_differences` contains the differences between the two
    reference runs."""
    reasons = []
    for quantity, fixed_limit in LIMITS.items():
        differences = layout_differences[quantity]
        rounding: Mapping[str, float] = rounding_differences[quantity]
        if quantity != "weights":  # for all steps, use the rounding of the worst step
            rounding = dict.fromkeys(differences, max(rounding_differences[quantity].values()))
        limits = {
            name: max(fixed_limit, ROUNDING_FACTOR * rounding.get(name, 0.0))
            for name in differences
        }
        worst = max(differences, key=lambda name: differences[name] / limits[name])
        if differences[worst] > limits[worst]:
            text = f"{worst} differs by {differences[worst]:.1e}, "
            text += f"but rounding explains at most {limits[worst]:.1e}."
            reasons.append(text[0].upper() + text[1:])
    return ("differs" if reasons else OK), " ".join(reasons)


def _relative_difference(value: float | None, reference: float | None) -> float:
    """Return the relative difference of `value` from `reference`. If exactly one of the values is
    missing (None) or is NaN, the difference is infinite."""
    if value is not None and reference:
        return _nan_to_inf(abs(value - reference) / reference)
    return 0.0 if value == reference else math.inf


def _nan_to_inf(difference: float) -> float:
    """Return infinity instead of NaN, because a comparison with NaN is always False."""
    return math.inf if math.isnan(difference) else difference


def _state_differences(run_dir: Path, reference_dir: Path) -> dict[str, float]:
    """Return the relative difference for each tensor in the last checkpoints: the norm of the
    difference, divided by the norm of the reference. The tensors are weights and optimizer state.
    The optimizer state is included because gradients of the wrong magnitude hardly change Adam's
    steps. Checkpoints of all layouts contain the same tensors."""
    files = []
    for checkpoint_dir in (run_dir, reference_dir):
        (folder,) = list_checkpoints(checkpoint_dir)
        files.append(TensorFiles(sorted(folder.glob("*.safetensors"))))
    tensors, reference = files
    names = sorted(tensors.stored_parts.keys() | reference.stored_parts.keys())
    # Tensors that are in only one checkpoint keep an infinite difference.
    differences = {name: math.inf for name in names if name.startswith(STATE)}
    for name in differences.keys() & tensors.stored_parts.keys() & reference.stored_parts.keys():
        reference_tensor = reference.read_whole(name)
        norm = max(float(torch.linalg.vector_norm(reference_tensor)), 1e-30)  # avoids division by 0
        difference = (
            float(torch.linalg.vector_norm(tensors.read_whole(name) - reference_tensor)) / norm
        )
        differences[name] = _nan_to_inf(difference)
    return differences
