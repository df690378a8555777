"""Generate the tables in strategies/LAWS.md and the guide's recipes with the functions that plan a
run. This module does not import torch."""

from collections.abc import Mapping, Sequence
from typing import Any

from distributed_training.plan.plan import Draft
from distributed_training.planner.answer import answer
from distributed_training.planner.make_plan import draft_plan
from distributed_training.planner.sort import sort_layouts
from distributed_training.predict.costs import used_by
from distributed_training.predict.mechanism import PipelineRank
from distributed_training.predict.predict import parse_cluster
from distributed_training.predict.traffic import sent_by_axis
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


GPUS = {"RTX-3060": "12 GB", "T4": "16 GB", "RTX-4090": "24 GB"}
TRAINED: dict[str, tuple[dict[str, Any], Sequence[str]]] = {  # settings and sizes of Qwen3
    "LoRA": ({"lora_rank": 16}, ("1.7B", "4B", "8B")),
    "LoRA, nf4": ({"lora_rank": 16, "base_dtype": "nf4"}, ("4B", "8B")),
    "all weights": ({}, ("0.6B",)),
}


def recipes() -> str:
    """Return a table of the GiB that Qwen3 models need on each of GPUS: the planner's first choice
    for four samples of 1,024 tokens, unless it offloads or is not certain to fit."""
    clusters = [parse_cluster(name) for name in GPUS]
    rows = []
    for trains, (settings, sizes) in TRAINED.items():
        for label in sizes:
            model = f"Qwen3-{label}"
            request = build_config({"model": model, "max_length": 1024, **settings})
            firsts = [sort_layouts(request, cluster)[0] for cluster in clusters]
            cells = [
                f"{first.memory.needed_bytes / GIB:.1f}"
                if first.memory_fit == "yes" and not first.plan.strategy.offloads
                else NO_LAYOUT
                for first in firsts
            ]
            rows.append([model, trains, *cells])
    columns = [f"{name} ({size})" for name, size in GPUS.items()]
    return markdown_table(rows, ["model", "trains", *columns])


# (cluster, note on the machine, what is trained, options)
RECIPES = (
    (
        "T4",
        " (Colab)",
        "adapters for Qwen3-1.7B",
        "--model Qwen/Qwen3-1.7B --lora_rank 16 --max_length 1024",
    ),
    (
        "2xT4",
        " (Kaggle)",
        "the same, with each GPU taking half of the data",
        "--model Qwen/Qwen3-1.7B --lora_rank 16 --max_length 1024 --num_gpus all",
    ),
    (
        "RTX-4060",
        " or any GPU with 8 GB",
        "adapters for Qwen3-4B on a 4-bit base",
        "--preset lora-8gb",
    ),
    (
        "RTX-3060",
        " or any GPU with 12 GB",
        "adapters for Qwen3-8B on a 4-bit base",
        "--preset lora-12gb",
    ),
    ("T4", " or any GPU with 16 GB", "all weights of Qwen3-0.6B", "--preset qwen-one-gpu"),
    ("RTX-4090", " or any GPU with 24 GB", "adapters for Qwen3-8B", "--preset lora-one-gpu"),
    (
        "RTX-4090",
        " or any GPU with fp8 and 24 GB",
        "the same on an fp8 base",
        "--model Qwen/Qwen3-8B --lora_rank 16 --base_dtype fp8 --max_length 1024",
    ),
    (
        "H100-80GB",
        "",
        "all weights of Qwen3-8B without an fp32 copy",
        "--model Qwen/Qwen3-8B --optimizer adamw-bf16-weights --max_length 1024",
    ),
    ("H100-80GB", "", "all weights of Qwen3-4B", "--model Qwen/Qwen3-4B --max_length 1024"),
)


def recipe_commands() -> str:
    """Return commands for fine-tuning on common GPUs, each with the memory of the planner's first
    choice."""
    lines = ["```bash"]
    for cluster, machine, trained, options in RECIPES:
        words = options.split()
        values = dict(zip(words[::2], words[1::2], strict=True))
        preset = values.pop("--preset", None)
        values.pop("--num_gpus", None)
        overrides = {name.removeprefix("--"): value for name, value in values.items()}
        request = build_config({}, preset=preset, overrides=overrides)
        memory = answer(request, parse_cluster(cluster)).first.memory
        lines += [
            f"# {cluster}{machine}: {trained}, {memory.needed_bytes / GIB:.1f} GiB",
            f"python real_model_example.py {options} --dataset chats.jsonl",
        ]
    return "\n".join([*lines, "```"])


def _merge_rows(cells: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Merge rows that have the same cells. Each returned row begins with the names of the rows that
    were merged."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, row in cells.items():
        names.setdefault(tuple(row), []).append(f"`{name}`")
    return [[", ".join(same), *row] for row, same in names.items()]


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
            rank = PipelineRank(plan)
            saved_bytes = sum(
                mechanism.activation_bytes(rank, rank.recomputed_share)
                for mechanism in used_by(plan)
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
