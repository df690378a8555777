"""What `parity` trains: one process twice, packed records one by one, then each layout."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from distributed_training.models import find_model
from distributed_training.planner.choose import choose_model
from distributed_training.planner.layouts import OPEN
from distributed_training.settings.config import AUTO
from distributed_training.settings.machine import Machine
from distributed_training.settings.strategies import named_strategy
from distributed_training.tools import compare

REFERENCE, AGAIN = "reference", "rounding"  # keys and verdicts of the runs of one process
# The key of one process that has packed records one by one; the verdict where none are packed
APART, NOT_PACKED = "one by one", "not packed"
DEQUANTIZED = "dequantized"  # the key of one process whose base is dequantized before training
OK = "ok"
# Other dropout masks are drawn under every layout.
ALWAYS: compare.Values = {"dropout": 0.0, "resume": None, "checkpoint_every": 2**31}
# Unless somebody says otherwise; a GPU replays a graph of the last steps.
USUALLY: compare.Values = {**compare.QUIETLY, "max_steps": 16, "eval_samples": 8}
PLAIN: compare.Values = {
    **OPEN, "strategy": "dp", "pipeline_schedule": AUTO, "compile": False, "cuda_graphs": False,
    "gradient_compression": "none",
}  # fmt: skip


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

    @property
    def is_layout(self) -> bool:
        """Return whether this trial is a layout to compare, not a reference."""
        return self.key.startswith("layout-")


def share_model(runs: Sequence[compare.Run], machine: Machine) -> None:
    """Give all runs the "auto" model with the most blocks that one of them needs, and fp32 unless
    CONFIG or the command line says otherwise."""
    models = []
    for run in runs:
        if run.config is not None:
            strategy = named_strategy(run.config)
            chosen = choose_model(run.config, machine, run.num_processes, strategy, [])
            models.append((find_model(chosen.model).size.num_layers, chosen.model))
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
    micro-batches, and with each packed record in a row of its own."""
    first, config = next((run, run.config) for run in runs if run.config)
    kept = compare.WORK | USUALLY.keys() | ALWAYS.keys() | {"precision"}
    plain = {name: value for name, value in first.values.items() if name in kept} | PLAIN
    size = int(config.batch_size)
    sequences = size * config.grad_accum_steps * first.num_processes
    other = 1 if size > 1 else first.num_processes
    found = []
    wanted = [
        (REFERENCE, "one process", size), (AGAIN, "again, cut otherwise", other),
        (APART, "records one by one", size),
    ]  # fmt: skip
    if config.base_dtype == "nf4":
        wanted.append((DEQUANTIZED, "dequantized base", size))
    for key, name, micro in wanted:
        values = plain | {"batch_size": micro, "grad_accum_steps": sequences // micro}
        found.append(Trial(key=key, name=name, values=values, num_processes=1))
    return found
