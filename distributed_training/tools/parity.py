"""Check that every layout computes the same results as a single process.

The reference is a training run in a single process without compilation. The reference is trained
twice, the second time with a different micro-batch size. The difference between these two runs is
the rounding error. A layout fails if its results differ from the reference by more than LIMITS and
by more than ROUNDING_FACTOR times the rounding error. Each tensor has a separate rounding error,
because Adam turns gradients that consist only of rounding errors into large steps.

An error in code that all layouts share also changes the reference. Therefore, in fp32 the two
references must agree. With adapters or packed records, the reference's last evaluation must also
equal an evaluation of the merged weights on records that are not packed.

With an fp8 base, a rounding error can move a value to the next fp8 number. The second reference
then trains on the base without fp8, so that the difference is the error of fp8."""

import argparse
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from distributed_training.planner.layouts import OPEN_SETTINGS
from distributed_training.records.display import fold
from distributed_training.records.folder import CHECKPOINTS, list_checkpoints
from distributed_training.records.record import METRICS_FILE, Record
from distributed_training.records.results import EMPTY_CELL, differing_keys, format_table
from distributed_training.settings.config import AUTO, Request, with_values
from distributed_training.settings.detect import detect_machine
from distributed_training.settings.errors import UserError, printable
from distributed_training.settings.files import plural
from distributed_training.settings.strategies import list_strategies
from distributed_training.tools import compare

# Relative differences that another order of summation in fp32 can cause, with a margin
LIMITS = {"loss": 1e-5, "gradient norm": 1e-4, "weights": 1e-3}
ROUNDING_FACTOR = 4
# Differences that rounding does not cause in fp32, however much training amplifies it
MAX_ROUNDING = {"loss": 1e-3, "gradient norm": 1e-2}
add_options = compare.add_options
STATE = ("weight/", "exp_avg/", "exp_avg_sq/")  # prefixes of the compared tensors in a checkpoint
OK, OTHER_WORK, SKIPPED = "ok", "other work", "skipped"
# Dropout is off, because each layout would draw different masks. A run saves one checkpoint, after
# its last step.
FORCED_VALUES: compare.Values = {"dropout": 0.0, "resume": None, "checkpoint_every": 2**31}
# Defaults that the user can override. In 16 steps, a GPU also replays a CUDA graph.
DEFAULTS: compare.Values = {**compare.QUIET_DEFAULTS, "max_steps": 16, "eval_samples": 8}
REFERENCE_VALUES: compare.Values = {
    **OPEN_SETTINGS,
    "strategy": "dp",
    "expert_parallel": False,
    "pipeline_schedule": AUTO,
    "compile": False,
    "cuda_graphs": False,
    "gradient_compression": "none",
}


def run(arguments: argparse.Namespace, build: compare.Build, script: Path) -> int:
    """Train under every layout, then print the table. Return the exit code, which is 0 if the
    layouts compute the same results as a single process."""
    if arguments.plan is None and arguments.strategies is None:
        arguments.strategies = ",".join(list_strategies())
    arguments.overrides |= FORCED_VALUES
    runs, out = compare.build_runs(arguments, build, script, choose_defaults(build({})))
    if arguments.out is None:
        out = out.with_name(f"parity-x{runs[0].num_processes}")
    references = build_references(runs, build)
    trials = [*references, *runs]
    if arguments.dry_run:
        compare.print_settings(trials)
        return 0

    def conclude(trial: compare.Run) -> str:
        judge(trial, *references)
        if trial in references and trial.record is None:
            raise UserError("A single-process reference run failed", trial.why)
        if trial is not references[0]:  # later trials need the reference's checkpoint
            remove_checkpoint(trial)
        return f"{trial.verdict}. {trial.why}" if trial.why else trial.verdict

    try:
        compare.train_each(trials, out, conclude)
    finally:
        remove_checkpoint(references[0])
        if any(trial.verdict for trial in runs):
            print_table([trial for trial in trials if trial.verdict])
    if any(trial.why for trial in references):
        return 1
    return exit_code([trial.verdict for trial in runs])


def exit_code(verdicts: Sequence[str]) -> int:
    """Return 0 if at least one layout computes the same results as a single process and no layout
    fails or computes different results. Otherwise, return 1."""
    has_failed = not {*verdicts} <= {OK, OTHER_WORK, SKIPPED}
    return 1 if has_failed or OK not in verdicts else 0


def choose_defaults(request: Request) -> compare.Values:
    """Return the defaults of `parity` for a CONFIG: fp32 and, on a CPU, a model with enough blocks
    for pipelines, unless CONFIG sets them."""
    defaults = dict(DEFAULTS)
    if request.precision == AUTO:
        defaults["precision"] = "fp32"
    is_open = request.model == AUTO and request.weights in (AUTO, "random")
    if is_open and not detect_machine().num_gpus:
        defaults["model"] = "gpt2-tiny-4-blocks"
    return defaults


def build_references(layouts: Sequence[compare.Run], build: compare.Build) -> list[compare.Run]:
    """Return the reference and a second run with another micro-batch size. Both train in a single
    process, with the same global batch size and the same values of `Plan.work` as the layouts."""
    first = next(run for run in layouts if run.config)
    config = first.config
    assert config is not None
    shared_keys = compare.WORK_KEYS | DEFAULTS.keys() | FORCED_VALUES.keys()
    shared = {name: value for name, value in first.values.items() if name in shared_keys}
    batch_size = int(config.batch_size)
    global_batch_size = batch_size * config.grad_accum_steps * first.num_processes
    other_size = 1 if batch_size > 1 else first.num_processes
    references: list[compare.Run] = []
    for name, size in (
        ("one process", batch_size),
        ("one process, other micro-batches", other_size),
    ):
        values = shared | REFERENCE_VALUES
        values |= {"batch_size": size, "grad_accum_steps": global_batch_size // size}
        if config.base_dtype == "fp8" and references:
            values["base_dtype"] = None
        reference = compare.build_run(values, (), build, first.command, num_processes=1)
        reference.name = name
        references.append(reference)
    return references


def remove_checkpoint(trial: compare.Run) -> None:
    if trial.record is not None:
        shutil.rmtree(Path(trial.record.run_dir) / CHECKPOINTS, ignore_errors=True)


def judge(trial: compare.Run, reference: compare.Run, rounding: compare.Run) -> None:
    """Set a finished trial's differences from the reference and its verdict."""
    if trial.record is None and trial.exit_code in (0, UserError.exit_code):
        trial.verdict = SKIPPED
    elif trial.record is None or trial.why:
        trial.verdict = "failed"
    elif trial is reference:
        trial.verdict = "reference"
        trial.why = check_evaluation(trial.record)
    else:
        assert reference.record is not None
        trial.differences = compare_records(trial.record, reference.record)
        if trial is rounding:
            trial.verdict = "rounding"
            if trial.record.config["precision"] == "fp32":
                trial.why = " ".join(find_excess(trial.differences, {}, MAX_ROUNDING))
            return
        keys = differing_keys([trial.record.work, reference.record.work])
        if keys:
            trial.verdict = OTHER_WORK
            trial.why = f"It uses different values for these keys: {', '.join(keys)}."
            return
        reasons = find_excess(trial.differences, rounding.differences)
        if has_equal_generators(Path(trial.record.run_dir)):
            reasons.append("Several ranks would draw the same dropout masks.")
        trial.why = " ".join(reasons)
        trial.verdict = "differs" if trial.why else OK


def check_evaluation(record: Record) -> str:
    """Evaluate a run's last weights with merged adapters and unpacked records, in fp32. Return how
    the loss differs from the run's last evaluation, or "" if it does not or both are the same
    computation."""
    import torch  # slow to import

    from distributed_training.plan.samples import load_data
    from distributed_training.tools.models import measure, open_checkpoint

    plan, trained, _ = open_checkpoint(list_checkpoints(Path(record.run_dir))[-1])
    config = plan.config
    is_other = (config.lora_rank or plan.packing) and record.evaluations
    if not is_other or config.precision != "fp32" or config.has_pairs or config.has_quantized_base:
        return ""
    trained = replace(trained, weights=trained.merged_weights(), adapters=None)
    if plan.packing:  # Running text has full blocks instead.
        plan = replace(plan, config=with_values(config, pack=False))
    data = load_data(plan)
    device = torch.device("cpu")
    evaluation = measure(trained.load(device), data.validation, data.bytes_per_token, device)
    difference = relative_difference(evaluation["loss"], record.evaluations[-1]["loss"])
    limit = ROUNDING_FACTOR * LIMITS["loss"]
    if difference <= limit:
        return ""
    text = "Loss of the last evaluation with merged adapters and unpacked records differs by "
    return f"{text}{difference:.1e}, but rounding explains at most {limit:.1e}."


def find_excess(
    differences: compare.Differences,
    rounding_differences: compare.Differences,
    limits: Mapping[str, float] = LIMITS,
) -> list[str]:
    """Return one sentence for each quantity in `limits` that differs by more than rounding
    explains. `differences` contains the differences between a layout and the reference.
    `rounding_differences` contains the differences between the two reference runs."""
    reasons = []
    for quantity, fixed_limit in limits.items():
        rounding = rounding_differences.get(quantity, {})
        worst_rounding = max(rounding.values(), default=0.0)
        excesses = []
        for name, difference in differences[quantity].items():
            own_rounding = worst_rounding  # for all steps, the rounding of the worst step
            if quantity == "weights":
                own_rounding = rounding.get(name, 0.0)
            limit = max(fixed_limit, ROUNDING_FACTOR * own_rounding)
            text = f"{name[0].upper()}{name[1:]} differs by {difference:.1e}, "
            text += f"but rounding explains at most {limit:.1e}."
            excesses.append((difference / limit, text))
        excess, text = max(excesses)
        if excess > 1:
            reasons.append(text)
    return reasons


def compare_records(record: Record, reference: Record) -> compare.Differences:
    """Return the relative differences in losses, gradient norms and tensors between two runs."""
    run_dir, reference_dir = Path(record.run_dir), Path(reference.run_dir)
    differences = {"weights": _state_differences(run_dir, reference_dir)}
    expected_figures = _read_figures(reference)
    for quantity, figures in _read_figures(record).items():
        expected = expected_figures[quantity]
        differences[quantity] = {
            name: relative_difference(figures.get(name), expected.get(name))
            for name in figures | expected
        }
    return differences


def _read_figures(record: Record) -> dict[str, dict[str, float | None]]:
    """Return the losses and the gradient norms of a run. A value is None if it is not finite."""
    with open(Path(record.run_dir) / METRICS_FILE, encoding="utf-8") as file:
        steps = [json.loads(line) for line in file]
    losses = {f"loss of step {row['step']}": row["loss"] for row in steps}
    for row in record.evaluations:
        losses[f"loss of the evaluation after step {row['step']}"] = row["loss"]
    norms = {f"gradient norm of step {row['step']}": row["grad_norm"] for row in steps}
    return {"loss": losses, "gradient norm": norms}


def has_equal_generators(run_dir: Path) -> bool:
    """Return whether two ranks of a run have the same state of their random number generators.
    Dropout is off in all runs, so it leaves no other trace."""
    files = _open_checkpoint(run_dir)
    states = [bytes(files.read_whole(n)) for n in files.stored_parts if n.startswith("random/")]
    return len({*states}) < len(states)


def _open_checkpoint(run_dir: Path) -> Any:
    from distributed_training.parallel.tensor_files import TensorFiles  # imports torch

    return TensorFiles(sorted(list_checkpoints(run_dir)[-1].glob("*.safetensors")))


def _state_differences(run_dir: Path, reference_dir: Path) -> dict[str, float]:
    """Return the relative difference for each tensor in the last checkpoints. The tensors are
    weights and optimizer state. The optimizer state is included because gradients of the wrong
    magnitude hardly change Adam's steps. Checkpoints of all layouts contain the same tensors."""
    checkpoints = [_open_checkpoint(folder) for folder in (run_dir, reference_dir)]
    differences = {}
    for name in sorted(checkpoints[0].stored_parts.keys() | checkpoints[1].stored_parts.keys()):
        if name.startswith(STATE):
            tensors = [
                files.read_whole(name) if name in files.stored_parts else None
                for files in checkpoints
            ]
            differences[name] = relative_difference(*tensors)
    return differences


def relative_difference(value: Any, reference: Any) -> float:
    """Return the relative difference of two numbers or tensors: the norm of the difference, divided
    by the norm of the reference. If exactly one of them is missing (None), or if one is NaN, the
    difference is infinite, because a comparison with NaN is always False."""
    import torch  # slow to import

    if value is None or reference is None:
        return 0.0 if value is reference else math.inf
    expected = torch.as_tensor(reference)
    norm = max(float(torch.linalg.vector_norm(expected)), 1e-30)  # avoids division by 0
    difference = float(torch.linalg.vector_norm(torch.as_tensor(value) - expected)) / norm
    return math.inf if math.isnan(difference) else difference


def print_table(trials: Sequence[compare.Run]) -> None:
    """Print the table of verdicts. The first two entries in `trials` are the single-process
    reference runs."""
    layouts = trials[2:]
    num_ok = sum(trial.verdict == OK for trial in layouts)
    heading = f"{num_ok} of {plural(len(layouts), 'layout')} computed the same results "
    heading += "as one process."
    limits = ", ".join(f"{limit:g} for {quantity}" for quantity, limit in LIMITS.items())
    explanation = (
        "Each value is the largest relative difference from the single-process run, over all "
        "steps and all tensors of the weights and of AdamW's state. The tolerance is the larger "
        f"of a fixed limit ({limits}) and {ROUNDING_FACTOR} times the difference between the two "
        "single-process runs (reference and rounding)."
    )
    columns = {"layout": [trial.name for trial in trials]}
    for quantity in LIMITS:
        columns[quantity] = [
            f"{max(trial.differences[quantity].values()):.1e}" if trial.differences else EMPTY_CELL
            for trial in trials
        ]
    columns["seconds"] = [f"{trial.seconds:.0f}" for trial in trials]
    columns["verdict"] = [trial.verdict for trial in trials]
    notes = [f"{trial.name} ({trial.verdict}): {trial.why}" for trial in trials if trial.why]
    print(f"\n{heading}\n\n{format_table(columns)}")
    for text in (*notes, explanation):
        print(fold(printable(text)))
