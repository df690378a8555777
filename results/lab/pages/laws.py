"""The tables of strategies/LAWS.md, computed by the functions that plan a run. No torch import."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from distributed_training.advise.make import draft_plan
from distributed_training.plan.plan import Plan
from distributed_training.plan.schedules import SCHEDULES
from distributed_training.predict.memory import STATE, Held, estimate_state
from distributed_training.predict.predict import lay_out_on, parse_cluster, predict
from distributed_training.settings.config import build_config
from distributed_training.settings.errors import UserError
from distributed_training.settings.strategies import (
    list_strategies,
    strategy_defaults,
    strategy_options,
)
from results.lab.pages.tables import markdown_table

GIB = 2**30
NONE = "-"  # no such layout


def plan_of(strategy: str, num_processes: int, **config: Any) -> Plan:
    """A draft on H200s of one node."""
    values = {"strategy": strategy, "model": "gpt2-xl", "max_length": 1024, **config}
    built = build_config(values, defaults=strategy_defaults, options=strategy_options)
    return draft_plan(built, parse_cluster(f"{num_processes}xH200"))


# Nvidia's figures for the Ada generation's smallest.
SMALL = {
    "memory_gib": 7.6, "tflops": 30.2, "fp32_tflops": 15.1, "memory_gb_s": 272.0, "num_sms": 24,
    "name": "RTX-4060",
}  # fmt: skip
RECIPES = (  # label, GPU, model, batch_size
    ("8 GB", json.dumps(SMALL), "gpt2", 8),
    ("16 GB", "T4", "gpt2-medium", 8),
    ("24 GB", "RTX-4090", "gpt2-large", 8),
    ("80 GB", "H100-80GB", "gpt2-xl", 16),
)


def recipes() -> str:
    """What a GPU of each size can train, as `plan` predicts: memory, minutes of two epochs."""
    rows = []
    for label, gpu, model, batch_size in RECIPES:
        cluster = parse_cluster("1", gpu)
        built = build_config({"strategy": "dp", "model": model, "batch_size": batch_size})
        prediction = predict(lay_out_on(cluster, built), cluster.rates)
        tokens = 2 * 1000 * built.max_length
        assert prediction.tokens_per_s is not None
        minutes = tokens / prediction.tokens_per_s / 60
        options = f"`--model {model} --batch_size {batch_size}`"
        needed = f"{prediction.memory.needed_bytes / GIB:.1f} GiB"
        rows.append([label, str(cluster.machine.gpu_name), options, needed, f"{minutes:.1f}"])
    return markdown_table(rows, ["GPU memory", "such as", "options", "needs", "minutes"])


def state(counts: Sequence[int] = (2, 4, 8)) -> str:
    """GiB of state on the fullest GPU, gpt2-xl in bf16."""
    cells = {
        strategy: [_state_of(strategy, count) for count in counts] for strategy in list_strategies()
    }
    possible = {name: row for name, row in cells.items() if row[-1] != NONE}  # 25 heads by two: no
    return markdown_table(_merged(possible), ["", *(f"P = {count}" for count in counts)])


def _merged(cells: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """A row for each name, but one for all whose cells are equal."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, row in cells.items():
        names.setdefault(tuple(row), []).append(f"`{name}`")
    return [[", ".join(same), *row] for row, same in names.items()]


def _state_of(strategy: str, num_processes: int) -> str:
    with contextlib.suppress(UserError):
        state = estimate_state(plan_of(strategy, num_processes))
        on_device = sum(state[part] for part in STATE)
        return f"{on_device / GIB:.1f}"
    return NONE


def activations() -> str:
    """Bytes that a block keeps, by token and unit of hidden size, bf16."""
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
            kept = Held(plan, 0).block_bytes(mode)
            cells.append(f"{kept / tokens / plan.size.hidden_size:.1f}")
        rows.append([name, *cells])
    modes = [f"`{mode}`" for mode in ("none", "selective", "full")]
    return markdown_table(rows, ["`activation_checkpointing`", *modes])


def bubbles(p: int = 4, counts: Sequence[int] = (4, 8, 16)) -> str:
    """Idle shares of a step over `p` equal stages, a backward pass twice a forward one."""
    cells = {}
    for name, schedule in SCHEDULES.items():
        shares = [schedule.bubble(p, m) for m in counts]
        cells[name] = ["no formula" if share is None else f"{share:.1%}" for share in shares]
    return markdown_table(_merged(cells), [f"p = {p}", *(f"m = {m}" for m in counts)])
