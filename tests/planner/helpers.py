"""Build plans and layouts from a few CONFIG values."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from distributed_training.models import find_model
from distributed_training.plan.layout import Batch, Stages
from distributed_training.plan.plan import Plan
from distributed_training.planner.layouts import Candidate, build_stages, fill_mesh, split_batch
from distributed_training.planner.make_plan import draft_plan, make_plan
from distributed_training.predict.predict import local_cluster
from distributed_training.settings.config import Request
from distributed_training.settings.machine import Machine
from distributed_training.settings.request import build_config
from distributed_training.settings.strategies import load_strategy
from tests.support import CPU_MACHINE, GPU_MACHINE

UNSPLIT = ["dp", "zero1", "zero2", "zero3", "offload", "infinity", "fsdp"]
SPLIT = ["tp", "pp", "3d", "hybrid", "cp"]
NAMES = [*UNSPLIT, *SPLIT]


class LayoutResult(NamedTuple):
    """The mesh, layout and batch of a plan."""

    mesh: Mapping[str, int]
    stages: Stages
    batch: Batch


def lay_out(world_size: int, *overrides: str, **config: Any) -> LayoutResult:
    """Return the mesh, layout and batch for the CONFIG values `config` and the
    `overrides`. Raises UserError if there is no valid layout."""
    requested = candidate(*overrides, **config)
    requested = replace(requested, mesh=fill_mesh(requested, world_size))
    return LayoutResult(requested.mesh, build_stages(requested), split_batch(requested))


def candidate(*overrides: str, mesh: dict[str, int] | None = None, **config: Any) -> Candidate:
    """Return a Candidate for CONFIG values and overrides. The default `mesh` is the
    strategy's mesh."""
    built = merged({"model": "gpt2-medium", **config}, *overrides)
    strategy = load_strategy(built)
    model = find_model(built.model)
    return Candidate(request=built, strategy=strategy, model=model, mesh=mesh or strategy.mesh)


def merged(config: Mapping[str, Any], *texts: str) -> Request:
    """Merge CONFIG values and `key=value` strings as the command line does."""
    return build_config(config, overrides=dict(text.split("=", 1) for text in texts))


def gpu(**changes: Any) -> Machine:
    """Return GPU_MACHINE with changed properties."""
    return replace(GPU_MACHINE, **changes)


def plan_for(
    tmp_path: Path,
    machine: Machine = CPU_MACHINE,
    num_processes: int = 2,
    *,
    here: int | None = None,
    checked: bool = True,
    **config: Any,
) -> Plan:
    """Return a plan, by default for gpt2-tiny. If `checked` is False, return a draft. `here` is the
    number of processes on this machine."""
    values = {"output_dir": str(tmp_path / "runs"), "model": "gpt2-tiny", **config}
    make = make_plan if checked else draft_plan
    cluster = local_cluster(machine, num_processes, here or num_processes)
    return make(merged(values), cluster)
