"""Generate the tables in strategies/LAWS.md with the functions that plan a run.

This module does not import torch."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from distributed_training.plan.plan import Draft
from distributed_training.planner.make_plan import draft_plan
from distributed_training.predict.costs import used_by
from distributed_training.predict.mechanism import PipelineRank
from distributed_training.predict.memory import STATE, estimate_state
from distributed_training.predict.predict import parse_cluster, predict
from distributed_training.predict.traffic import sent_by_axis
from distributed_training.settings.errors import UserError
from distributed_training.settings.request import build_config
from distributed_training.settings.strategies import list_strategies
from results.lab.pages.tables import markdown_table

GIB = 2**30
NO_LAYOUT = "-"  # cell for a combination that has no valid layout


def plan_of(strategy: str, num_processes: int, **config: Any) -> Draft:
    """Return the draft of a plan for `num_processes` H200s on one node."""
    values = {"strategy": strategy, "model": "gpt2-xl", "max_length": 1024, **config}
    built = build_config(values)
    return draft_plan(built, parse_cluster(f"{num_processes}xH200"))


# GiB that programs can use on a GPU of each size, as on an RTX 4060, 4070, 4080, 4090 and an H100
GPU_SIZES = {"8 GB": 7.6, "12 GB": 11.6, "16 GB": 15.6, "24 GB": 23.5, "80 GB": 79.1}
RECIPE = {"strategy": "dp", "precision": "bf16", "max_length": 1024, "loss_chunk_tokens": 1024}
QWEN3 = ("0.6B", "1.7B", "4B", "8B")
SMALL = ("0.6B", "1.7B")  # models that do not need a 4-bit base on these GPUs
TRAINED: dict[str, dict[str, Any]] = {
    "LoRA": {"lora_rank": 16},
    "LoRA, nf4": {"lora_rank": 16, "base_dtype": "nf4"},
    "all weights": {},
}
BATCH_SIZES = (16, 8, 4, 2, 1)
MODES = ("none", "selective", "full")


def recipes() -> str:
    """Return a table of settings with which each Qwen3 model should fit on GPUs of each memory
    size, according to `plan`. The settings are `batch_size` and `activation_checkpointing`. The
    table omits rows in which nothing fits."""
    rows = []
    for trains, settings in TRAINED.items():
        for label in QWEN3:
            if "base_dtype" in settings and label in SMALL:
                continue
            config = {**RECIPE, "model": f"Qwen3-{label}", **settings}
            cells = [_best_fitting(config, size) for size in GPU_SIZES.values()]
            if set(cells) != {NO_LAYOUT}:
                rows.append([config["model"], trains, *cells])
    return markdown_table(rows, ["model", "trains", *GPU_SIZES])


def _best_fitting(config: Mapping[str, Any], memory_gib: float) -> str:
    """Return the text of a table cell: a batch size and a recomputation mode that fit in
    `memory_gib`. The cell shows the first mode in MODES with which at least four samples fit. If
    there is no such mode, the cell shows the mode that allows the largest batch."""
    gpu = {"memory_gib": memory_gib, "tflops": 100.0, "memory_gb_s": 1000.0, "name": "GPU"}
    cluster = parse_cluster("1", json.dumps(gpu))
    fitting = []
    for mode in MODES:
        for size in BATCH_SIZES:
            built = build_config({**config, "batch_size": size, "activation_checkpointing": mode})
            if predict(draft_plan(built, cluster), cluster.rates).gpu_memory_fit == "yes":
                fitting.append((size, mode))
                break
    with_4_samples = [pair for pair in fitting if pair[0] >= 4]
    best = next(iter(with_4_samples), max(fitting, default=None))
    return NO_LAYOUT if best is None else ", ".join(str(part) for part in best if part != "none")


def state(counts: Sequence[int] = (2, 4, 8)) -> str:
    """Return a table of the training state's size in GiB for gpt2-xl in bf16, with one column per
    number of GPUs. Each size is for the GPU with the largest state."""
    cells = {
        strategy: [_state_of(strategy, count) for count in counts] for strategy in list_strategies()
    }
    # The 25 heads cannot be split evenly by tp.
    possible = {name: row for name, row in cells.items() if row[-1] != NO_LAYOUT}
    return markdown_table(_merge_rows(possible), ["", *(f"P = {count}" for count in counts)])


def _merge_rows(cells: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Merge rows that have the same cells. Each returned row begins with the names of the rows that
    were merged."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, row in cells.items():
        names.setdefault(tuple(row), []).append(f"`{name}`")
    return [[", ".join(same), *row] for row, same in names.items()]


def _state_of(strategy: str, num_processes: int) -> str:
    with contextlib.suppress(UserError):
        state = estimate_state(plan_of(strategy, num_processes))
        on_device = sum(state[part] for part in STATE)
        return f"{on_device / GIB:.1f}"
    return NO_LAYOUT


def activations() -> str:
    """Return a table of the bytes that a block keeps per token and hidden unit, in bf16."""
    layouts: dict[str, dict[str, Any]] = {
        "one GPU": {"strategy": "dp"},
        "`tp` 4": {"strategy": "tp", "tp": 4},
    }
    rows = []
    for name, config in layouts.items():
        cells = []
        for mode in ("none", "selective", "full"):
            plan = plan_of(
                num_processes=4 if "tp" in config else 1, model="gpt2-medium", num_microbatches=1,
                activation_checkpointing=mode, **config,
            )  # fmt: skip
            tokens = plan.batch.micro_batch_size * plan.config.max_length
            saved_bytes = sum(
                mechanism.activation_bytes(PipelineRank(plan)) for mechanism in used_by(plan)
            )
            cells.append(f"{saved_bytes / tokens / plan.size.hidden_size:.1f}")
        rows.append([name, *cells])
    modes = [f"`{mode}`" for mode in ("none", "selective", "full")]
    return markdown_table(rows, ["`activation_checkpointing`", *modes])


def traffic() -> str:
    """Return a table of the GiB that a process of the busiest pipeline rank sends per step, for 8
    samples of 1,024 tokens per GPU, as one micro-batch or as four."""
    splits: Sequence[dict[str, Any]] = ({"batch_size": 8}, {"batch_size": 2, "grad_accum_steps": 4})
    model = "gpt2-xl-20-heads"  # tp divides the number of heads.
    cells = {}
    for strategy in list_strategies():
        plans = [plan_of(strategy, 4, model=model, **split) for split in splits]
        cells[strategy] = [f"{sum(sent_by_axis(plan).values()) / GIB:.2f}" for plan in plans]
    return markdown_table(_merge_rows(cells), ["GiB per step", "8 samples", "4 x 2 samples"])
