"""The tables of strategies/LAWS.md, computed by the functions that plan a run. No torch import."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from distributed_training.advise.cluster import cluster_of
from distributed_training.advise.make import draft_plan
from distributed_training.plan.plan import Plan
from distributed_training.plan.schedules import SCHEDULES
from distributed_training.predict.memory import block_bytes
from distributed_training.predict.state import estimate_state
from distributed_training.settings.config import build_config
from distributed_training.settings.errors import UserError
from distributed_training.settings.gpus import GPUS
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
    machine = cluster_of(GPUS["H200"], 1, num_processes).machine
    return draft_plan(built, machine, num_processes, num_processes)


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
        plan = plan_of(strategy, num_processes)
        return f"{estimate_state(plan).on_device / GIB:.1f}"
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
            cells.append(f"{block_bytes(plan) / tokens / plan.size.hidden_size:.1f}")
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
