"""Commands and SLURM jobs that run a planned layout. No torch import."""

import argparse
import contextlib
import math
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from distributed_training.data.corpus import EMBEDDED, PROSE, WIKITEXT
from distributed_training.data.samples import AUTO_SAMPLES
from distributed_training.plan.plan import Plan
from distributed_training.planner.choose import choose_model
from distributed_training.planner.data import find_sources, fit_to_data, peek_data
from distributed_training.planner.rank import settings_of
from distributed_training.predict.predict import Prediction
from distributed_training.settings.config import AUTO, KEYS, PATHS, Request
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import ROOT
from distributed_training.settings.keys import by_key, read_keys
from distributed_training.settings.machine import GIB
from distributed_training.settings.strategies import named_strategy, strategy_options

AROUND_STEPS_S = 900  # of a job's time: starting, loading, compiling, evaluating, saving
SPARE = 1.25  # of the RAM and the seconds that are predicted
_NAMES = {AUTO, EMBEDDED, PROSE, WIKITEXT, "gpt2", "pretrained", "random"}  # no paths
_MADE_LATER = {"output_dir", "offload_dir"}
# `settings_of` has these; what else a plan asks for differs from what was typed.
_OF_LAYOUT = {"pipeline_schedule", "micro_batch_size"}


def options_of(
    plan: Plan,
    arguments: argparse.Namespace,
    configure: Callable[[Sequence[str]], Request],
    *,
    elsewhere: bool = False,
) -> list[str]:
    """Return the options under which the script makes this plan: the preset, each key that was
    typed, then the layout and every key that the planner decided. `elsewhere`: the command runs in
    another folder, so that relative paths become absolute."""
    strategy = plan.strategy.name
    texts = [text.split("=", 1) for text in arguments.overrides]
    keys = KEYS | read_keys(strategy_options(strategy))
    typed = by_key(((name.strip(), value) for name, value in texts), keys, "the command line")
    base = configure([*arguments.overrides, f"strategy={strategy}"])
    if plan.machine.num_gpus == 0:  # this machine will decide again, and more than the model
        base = choose_model(base, plan.machine, plan.num_processes, named_strategy(base), [])
    asked = plan.requested.to_user_words()
    decided: dict[str, Any] = {
        name: asked[name]
        for name, value in base.to_user_words().items()
        if asked[name] != value and name not in _OF_LAYOUT
    }
    values = typed | {"strategy": strategy} | decided | settings_of(plan)
    preset = arguments.preset
    if elsewhere:
        values |= _absolute_paths(plan)
        preset = str(Path(preset).absolute()) if preset and Path(preset).is_file() else preset
    words = ["--preset", preset] if preset else []
    words += [f"--{name}" for name in ("force", "strict") if getattr(arguments, name)]
    for name, value in values.items():
        text = str(value)
        # argparse would read other values that begin with a dash as options.
        dashed = text.startswith("-") and text != "-1"
        words += [f"--{name}={text}"] if dashed else [f"--{name}", text]
    return words


def _absolute_paths(plan: Plan) -> dict[str, str]:
    """Return the keys whose values are relative paths, with absolute ones."""
    found = {}
    for name in PATHS:
        value = getattr(plan.requested, name)
        path, colon, size = (value or "").partition(":")  # a model family may name a size
        is_name = value in _NAMES
        if name == "model":
            is_name = plan.model.weights_dir is None and not Path(plan.model.family).is_absolute()
        if is_name or not value or Path(path).is_absolute():
            continue
        if name in _MADE_LATER or Path(path).exists():
            found[name] = f"{Path(path).absolute()}{colon}{size}"
    return found


def num_steps(plan: Plan) -> int | None:
    """Return the optimizer steps of the work that CONFIG asks for; None if only its text, which is
    not on this machine or large, can tell."""
    config = plan.config
    if config.max_steps != -1:
        return config.max_steps
    if config.num_samples == -1:
        if not Path(config.dataset).exists():
            return None
        with contextlib.suppress(UserError, OSError):
            plan = find_sources(plan, [])
            data = peek_data(plan)
            return fit_to_data(plan, data, []).num_steps if data else None
        return None
    samples = AUTO_SAMPLES if config.num_samples == AUTO else int(config.num_samples)
    return config.epochs * math.ceil(samples / plan.batch.global_batch_size)


def batch_script(
    choice: Prediction,
    file: Path,
    script: Path,
    words: Sequence[str],
    *,
    on: Sequence[str],
    typed: str,
) -> str:
    """Return configs/train.slurm for a layout; options `on` name its machines, and `typed` is the
    command that plans it. RAM and time have a quarter more than predicted."""
    plan = choice.plan
    here = plan.processes_here
    ram = choice.memory.host_bytes * here
    steps = num_steps(plan)
    name = shlex.quote(file.name)
    header = [
        f"# Submit:  sbatch {name}",
        f"# Check first, outside of the queue:  bash {name}",
        f"# Written by:  {typed}",
    ]
    time = "04:00:00"
    if choice.step is None or steps is None:
        header.append("# --time is not predicted: the length of the text or the GPU is not known.")
    else:
        least, most = choice.likely_s or (choice.step.seconds, choice.step.seconds)
        header.append(f"# Predicted: {steps:,} steps of {least:.3g} to {most:.3g} s.")
        time = slurm_time(SPARE * steps * most + AROUND_STEPS_S)
    own = [script.name, *words]
    own += [] if "--strict" in own else ["--strict"]
    own += [] if "--resume" in own else ["--resume", "auto"]
    job = (ROOT / "configs" / "train.slurm").read_text(encoding="utf-8")
    for there, ours in {
        job.splitlines()[1]: "\n".join(header),
        "--job-name=gpt2": f"--job-name={plan.strategy.name}",
        "#SBATCH --nodes=1": f"#SBATCH --nodes={plan.num_processes // here}",
        "--gpus-per-node=4": f"--gpus-per-node={here}",
        "--mem=64G": f"--mem={math.ceil(SPARE * ram / GIB)}G",
        "--time=04:00:00": f"--time={time}",
        'cd "${SLURM_SUBMIT_DIR:-.}"': f"cd {shlex.quote(str(script.parent))}",
        "(real_model_example.py --strict --resume auto": f"({shlex.join(own)}",
        "--dry-run  # here": shlex.join([*on, "--dry-run"]),
    }.items():
        assert job.count(there) == 1, there
        job = job.replace(there, ours)
    return job


def slurm_time(seconds: float) -> str:
    """Format a time limit as SLURM reads it, rounded up to whole five minutes."""
    minutes = 5 * math.ceil(seconds / 300)
    days, minutes = divmod(minutes, 24 * 60)
    text = f"{minutes // 60:02}:{minutes % 60:02}:00"
    return f"{days}-{text}" if days else text
