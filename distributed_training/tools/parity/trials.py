"""List the runs of `parity`: the single-process reference runs, then one run per layout."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from distributed_training.planner.choose import choose_model
from distributed_training.planner.layouts import OPEN_SETTINGS
from distributed_training.settings.config import AUTO
from distributed_training.settings.machine import Machine
from distributed_training.settings.strategies import named_strategy
from distributed_training.tools import compare

REFERENCE, ROUNDING = "reference", "rounding"  # keys and verdicts of the two single-process runs
# Key of the single-process run with one packed record per row, and the verdict if no records are
# packed
ONE_BY_ONE, NOT_PACKED = "one by one", "not packed"
DEQUANTIZED = "dequantized"  # key of the single-process run with dequantized weights
OK = "ok"
# Dropout is off, because each layout would draw different masks.
FORCED_VALUES: compare.Values = {"dropout": 0.0, "resume": None, "checkpoint_every": 2**31}
# Defaults that the user can override. In 16 steps, a GPU also replays a CUDA graph.
DEFAULTS: compare.Values = {**compare.QUIET_DEFAULTS, "max_steps": 16, "eval_samples": 8}
REFERENCE_VALUES: compare.Values = {
    **OPEN_SETTINGS, "strategy": "dp", "pipeline_schedule": AUTO, "compile": False,
    "cuda_graphs": False, "gradient_compression": "none",
}  # fmt: skip


@dataclass(kw_only=True, slots=True)
class Trial:
    """One training run in the check and its result."""

    key: str
    name: str
    values: compare.Values
    num_processes: int
    verdict: str = ""  # "" until the run has a result
    why: str = ""
    apart: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds: float = 0.0
    mesh: dict[str, int] | None = None
    # Complete line of the results file, with CONFIG and steps
    result: compare.Values = field(default_factory=dict)

    @property
    def is_layout(self) -> bool:
        """True if this trial is a layout to compare, not a reference."""
        return self.key.startswith("layout-")


def share_model(runs: Sequence[compare.Run], machine: Machine) -> None:
    """Give all runs the same "auto" model: the model with the most blocks among the models that the
    runs would choose. Set precision to fp32 unless CONFIG or the command line sets it."""
    models = []
    for run in runs:
        if run.config is not None:
            strategy = named_strategy(run.config)
            config, model = choose_model(run.config, machine, run.num_processes, strategy, [])
            models.append((model.size.num_layers, config.model))
    for run in runs:
        run.values |= FORCED_VALUES
        if run.config is not None and run.config.model == AUTO:
            run.values["model"] = max(models)[1]
        if run.config is not None and run.config.precision == AUTO:
            run.values["precision"] = "fp32"


def layouts_of(runs: Sequence[compare.Run]) -> list[Trial]:
    """Return one trial per layout. Layouts that CONFIG rejects have the verdict "skipped"."""
    return [
        Trial(
            key=f"layout-{number}", name=run.name, values=run.values, why=run.why,
            verdict="skipped" if run.why else "", num_processes=run.num_processes,
        )
        for number, run in enumerate(runs)
    ]  # fmt: skip


def references_for(runs: Sequence[compare.Run]) -> list[Trial]:
    """Return the single-process trials, with the same global batch size and the same values of
    `Plan.work` as the layouts. The trials are the reference, the reference with another micro-batch
    size, and a run with one packed record per row. With an NF4 base, there is also a trial with
    dequantized weights."""
    first, config = next((run, run.config) for run in runs if run.config)
    shared_keys = compare.WORK_KEYS | DEFAULTS.keys() | FORCED_VALUES.keys() | {"precision"}
    shared = {
        name: value for name, value in first.values.items() if name in shared_keys
    } | REFERENCE_VALUES
    size = int(config.batch_size)
    global_batch_size = size * config.grad_accum_steps * first.num_processes
    other_size = 1 if size > 1 else first.num_processes
    references = [
        (REFERENCE, "one process", size),
        (ROUNDING, "one process, other micro-batches", other_size),
        (ONE_BY_ONE, "records one by one", size),
    ]  # fmt: skip
    if config.base_dtype == "nf4":
        references.append((DEQUANTIZED, "dequantized base", size))
    trials = []
    for key, name, micro_batch_size in references:
        batch = {
            "batch_size": micro_batch_size,
            "grad_accum_steps": global_batch_size // micro_batch_size,
        }
        trials.append(Trial(key=key, name=name, values=shared | batch, num_processes=1))
    return trials
