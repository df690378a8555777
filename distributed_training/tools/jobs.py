"""Build commands and SLURM jobs that run a planned layout. This module does not import torch."""

import argparse
import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from distributed_training.data.report import Amount
from distributed_training.plan.plan import Draft
from distributed_training.planner.rank import layout_settings
from distributed_training.predict.predict import Prediction
from distributed_training.settings.files import MARK, ROOT
from distributed_training.settings.machine import GIB
from distributed_training.settings.request import parse_overrides

OVERHEAD_S = 900  # seconds per job for starting, compiling, evaluating and saving
SAFETY_FACTOR = 1.25  # factor by which predicted RAM and time are multiplied


def build_options(plan: Draft, arguments: argparse.Namespace) -> list[str]:
    """Return the options with which the script produces this plan: the preset, the typed keys, the
    keys that the planner set as if they were typed, and the layout."""
    set_by = plan.requested.set_by
    requested = plan.requested.to_key_values().items()
    values = parse_overrides(arguments.overrides) | {
        name: value for name, value in requested if set_by.get(name) == "command line"
    }
    values |= {"strategy": plan.strategy.name} | layout_settings(plan)
    options = ["--preset", arguments.preset] if arguments.preset else []
    options += [f"--{name}" for name in ("force", "strict") if getattr(arguments, name)]
    for name, value in values.items():
        text = str(value)
        # argparse reads values that begin with a dash as options, except for negative numbers.
        has_dash = text.startswith("-") and text != "-1"
        options += [f"--{name}={text}"] if has_dash else [f"--{name}", text]
    return options


def build_batch_script(
    choice: Prediction,
    amount: Amount | str,
    file: Path,
    script: Path,
    options: Sequence[str],
    *,
    machine_options: Sequence[str],
    plan_command: str,
) -> str:
    """Return the contents of configs/train.slurm, filled in for a layout and an amount of work (or
    the reason why it is unknown). `options` are the
    script's options, and `machine_options` are the options that describe the cluster.
    `plan_command` is the command that writes this job. The job requests 25% more RAM and time than
    predicted."""
    plan = choice.plan
    processes_here = plan.processes_here
    ram_bytes = choice.memory.host_bytes * processes_here
    name = shlex.quote(file.name)
    header = [
        f"# Submit:  sbatch {name}",
        f"# Check first, without the queue:  bash {name}",
        f"# {MARK}:  {plan_command}",
    ]
    time = "04:00:00"
    if isinstance(amount, str) or choice.step is None:
        reason = amount if isinstance(amount, str) else "the GPU's speed is unknown"
        header.append(f"# --time is a default: {reason}.")
    else:
        steps = math.ceil(amount.num_steps * (1 + amount.error))
        min_step_s, max_step_s = choice.likely_s or (choice.step.seconds, choice.step.seconds)
        header.append(
            f"# Predicted: {steps:,} steps of {min_step_s:.3g} to {max_step_s:.3g} s each."
        )
        time = slurm_time(SAFETY_FACTOR * steps * max_step_s + OVERHEAD_S)
    script_words = [str(script), *options]
    script_words += [] if "--strict" in script_words else ["--strict"]
    script_words += [] if "--resume" in script_words else ["--resume", "auto"]
    # Relative paths in the options refer to the current folder.
    run_line = f"cd {shlex.quote(str(Path.cwd()))}\nrun=({shlex.join(script_words)}"
    job = (ROOT / "configs" / "train.slurm").read_text(encoding="utf-8")
    for template_text, job_text in {
        job.splitlines()[1]: "\n".join(header),
        "--job-name=gpt2": f"--job-name={plan.strategy.name}",
        "#SBATCH --nodes=1": f"#SBATCH --nodes={plan.num_processes // processes_here}",
        "--gpus-per-node=4": f"--gpus-per-node={processes_here}",
        "--mem=64G": f"--mem={math.ceil(SAFETY_FACTOR * ram_bytes / GIB)}G",
        "--time=04:00:00": f"--time={time}",
        'cd "${SLURM_SUBMIT_DIR:-.}"': f"cd {shlex.quote(str(script.parent))}",
        "run=(real_model_example.py --strict --resume auto": run_line,
        "--dry-run)  # here": shlex.join([*machine_options, "--dry-run"]) + ")",
    }.items():
        assert job.count(template_text) == 1, template_text
        job = job.replace(template_text, job_text)
    return job


def slurm_time(seconds: float) -> str:
    """Format a time limit for SLURM, rounded up to a multiple of five minutes."""
    minutes = 5 * math.ceil(seconds / 300)
    days, minutes = divmod(minutes, 24 * 60)
    text = f"{minutes // 60:02}:{minutes % 60:02}:00"
    return f"{days}-{text}" if days else text
