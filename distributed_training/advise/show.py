"""A ranking of layouts as a table, as commands, as JSON and as a batch script. No torch import."""

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import DataRow, TableFormat, tabulate

from distributed_training.advise.rank import settings_of
from distributed_training.plan.plan import Plan
from distributed_training.predict.memory import STATE
from distributed_training.predict.predict import Prediction
from distributed_training.predict.rates import FITTED
from distributed_training.settings.files import ROOT
from distributed_training.settings.machine import GIB

HEADERS = ("layout", "fits", "GiB", "state", "acts", "other")
SPEED = ("s/step", "tok/s", "MFU", "likely", "bound by")
_CELLS = DataRow("", " ", "")
ONE_SPACE = TableFormat(None, None, None, None, _CELLS, _CELLS, padding=0, with_header_hide=None)


def layout_name(plan: Plan) -> str:
    """ "3d pp=4 tp=2 1f1b m8": strategy, axes unless the name says all, the cut of the batch."""
    words = [plan.strategy.name]
    if settings_of(plan).keys() & plan.mesh.keys():
        words += [f"{axis}={size}" for axis, size in plan.mesh.items() if size > 1]
    if plan.mesh["pp"] > 1:
        words.append(plan.config.pipeline_schedule)
    if plan.batch.num_microbatches > 1:
        words.append(f"m{plan.batch.num_microbatches}")
    return " ".join(words)


def table(choices: Sequence[Prediction]) -> str:
    """One row a layout: GiB of the fullest process, in all and by component."""
    strategies = [choice.plan.strategy for choice in choices]
    away = any(each.steps_on_host or each.fetches_parameters for each in strategies)
    headers = [*HEADERS, *(["RAM", "disk"] if away else []), *SPEED]
    rows = [headers, *(_row(choice, away) for choice in choices)]
    sides = ["left", *["right"] * (len(headers) - 2), "left"]
    return tabulate(rows, tablefmt=ONE_SPACE, disable_numparse=True, colalign=sides)


def _row(choice: Prediction, away: bool) -> list[str]:
    memory = choice.memory
    parts = memory.fullest
    sizes = [
        memory.needed_bytes,
        sum(parts[name] for name in STATE),
        parts["activations"] + parts["logits"],
        parts["copies"] + parts["buffers"] + memory.context_bytes,
    ]
    if away:
        sizes += [memory.host_bytes, memory.disk_bytes]
    speed = ["-"] * len(SPEED)
    if choice.step is not None:
        likely = (100 * (share - 1) for share in vars(FITTED.likely_s)[choice.kind])
        speed = [
            f"{choice.step.seconds:.3f}",
            count(choice.tokens_per_s or 0.0),
            "-" if choice.mfu is None else f"{100 * choice.mfu:.0f}%",
            "{:+.0f}/{:+.0f}%".format(*likely),
            choice.step.bound_by,
        ]
    return [layout_name(choice.plan), choice.room, *(count(size / GIB) for size in sizes), *speed]


def count(number: float) -> str:
    """Three digits and a letter."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def launch_command(plan: Plan, script: str, words: Sequence[str]) -> str:
    """What to type, on each node, to start the processes of a plan; `words`: the options."""
    here = plan.processes_here
    nodes = plan.num_processes // here
    start = ["python", script]
    if nodes > 1:
        # By itself torchrun waits ten minutes for the others.
        wait = f"--rdzv_conf=join_timeout={plan.config.rendezvous_timeout_s}"
        place = [f"--nnodes={nodes}", "--rdzv_backend=c10d", "--rdzv_endpoint=FIRST_HOST:29500"]
        start = ["torchrun", *place, wait, f"--nproc_per_node={here}", script]
    elif here > 1 and not any(word.startswith("--num_gpus") for word in words):
        start += ["--num_gpus", str(here)]
    return shlex.join([*start, *words])


def options_of(plan: Plan, typed: dict[str, str]) -> list[str]:
    """What else the user `typed`, keys and their values, then what gives a layout."""
    settings = {"strategy": plan.strategy.name, **settings_of(plan)}
    kept = {key: value for key, value in typed.items() if key not in settings}
    return [word for key, value in (kept | settings).items() for word in (f"--{key}", str(value))]


def as_dict(choice: Prediction) -> dict[str, Any]:
    """A layout for programs: `memory_bytes` is component -> bytes by rank."""
    plan = choice.plan
    places = choice.memory.by_place
    each = plan.num_processes // len(places)
    by_rank = {part: [place[part] for place in places for _ in range(each)] for part in places[0]}
    return {
        "strategy": plan.strategy.name,
        "axes": plan.mesh,
        "schedule": plan.config.pipeline_schedule if plan.mesh["pp"] > 1 else None,
        "micro_batch_size": plan.batch.micro_batch_size,
        "num_microbatches": plan.batch.num_microbatches,
        "fits": choice.fits,
        "memory_bytes": by_rank,
        "step_time_s": choice.step and choice.step.seconds,
        "tokens_per_s": choice.tokens_per_s,
        "likely_s": choice.likely_s,
        "likely_bytes": choice.memory.likely_bytes,
    }


def why_first(best: Prediction, others: Sequence[Prediction]) -> str:
    """One sentence on the first choice, against the quickest of another strategy."""
    name = layout_name(best.plan)
    step = best.step
    if step is None:
        return f"{name} needs least memory; how fast it is cannot be told without the GPU's rates."
    said = f"{name} is the quickest that fits: its step of {step.seconds:.3f} s is mostly "
    said += step.bound_by
    for other in others:
        if other.plan.strategy.name != best.plan.strategy.name and other.step:
            times = other.step.seconds / step.seconds
            more = f"{times:.1f} times as long" if times > 2 else f"{times - 1:.1%} longer"
            return f"{said}; {layout_name(other.plan)} takes {more}."
    return f"{said}."


def batch_script(choice: Prediction, script: Path, words: Sequence[str]) -> str:
    """configs/train.slurm for a layout, with a quarter more RAM than is predicted for a node."""
    plan = choice.plan
    here = plan.processes_here
    ram = choice.memory.host_bytes * here
    job = (ROOT / "configs" / "train.slurm").read_text(encoding="utf-8")
    for there, own in {
        "--job-name=gpt2": f"--job-name={plan.strategy.name}",
        "#SBATCH --nodes=1": f"#SBATCH --nodes={plan.num_processes // here}",
        "--gpus-per-node=4": f"--gpus-per-node={here}",
        "--mem=64G": f"--mem={math.ceil(1.25 * ram / GIB)}G",
        'cd "$SLURM_SUBMIT_DIR"': f"cd {shlex.quote(str(script.parent))}",
        "(real_model_example.py": f"({shlex.join([script.name, *words])}",
    }.items():
        assert job.count(there) == 1, there
        job = job.replace(there, own)
    return job
