"""The sizes of the mesh's axes, or the nearest possible ones as settings to type. No torch import.

    world_size == pp * dp_replicate * dp_shard * tp

That is never rounded. What a refusal suggests has been tried on the rules that refuse.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from distributed_training.plan.layouts import Candidate, build_layout, cut_batch, why_indivisible
from distributed_training.plan.schedules import divisors
from distributed_training.plan.topology import show_axes
from distributed_training.settings.config import AUTO
from distributed_training.settings.engines import MESH_AXES
from distributed_training.settings.errors import UserError
from distributed_training.settings.strategies import Strategy

Settings = dict[str, Any]  # CONFIG key -> value, to be put over what was asked
OPEN_BATCH: Settings = {"micro_batch_size": AUTO, "num_microbatches": AUTO}
# With these values a layout is refused for its axes alone.
HARMLESS: Settings = {
    "sequence_parallel": False,
    "activation_checkpointing": "none",
    "pipeline_cut": None,
    **OPEN_BATCH,
}
# With these fsdp takes any number of processes.
OPEN: Settings = dict.fromkeys((*MESH_AXES, "pipeline_cut", "deepspeed_config")) | OPEN_BATCH


def fill_mesh(candidate: Candidate, world_size: int) -> dict[str, int]:
    """The strategy's mesh with the axis that is -1 filled in; UserError where that cannot be."""
    strategy = candidate.strategy
    axes = dict(strategy.mesh)
    fixed, open_axis = _split_mesh(strategy)
    if any(n < 1 and axis != open_axis for axis, n in axes.items()):
        what = f"mesh {show_axes(axes)} is not accepted; at most one axis may be -1"
        raise UserError(what, fix="give the others whole numbers of 1 or more")
    if open_axis and world_size % fixed == 0:
        axes[open_axis] = world_size // fixed
    if math.prod(axes.values()) != world_size:
        what = f"mesh {show_axes(axes)} does not make {world_size} processes"
        number = f"a multiple of {fixed}" if open_axis else fixed
        why = f"that of {os.path.relpath(strategy.source)} needs {number}"
    else:
        what, why = why_indivisible(dataclasses.replace(candidate, mesh=axes))
    if not what:
        return axes
    found = nearest_layouts(candidate, world_size)[:3]
    fix = "set " + "; or ".join(map(show_settings, found))
    if not found:
        given = show_settings(_changes(candidate, OPEN))
        fix = "take fsdp" + (f" with {given}" if given else "")
    raise UserError(what, why, fix)


def nearest_layouts(candidate: Candidate, world_size: int) -> list[Settings]:
    """Settings each of which makes a layout of `world_size` processes under the strategy, those
    nearest to its mesh first: fewest settings, then the sum of the ratios' logarithms.
    """
    strategy = candidate.strategy
    fixed, open_axis = _split_mesh(strategy)
    asked = {**strategy.mesh, **({open_axis: max(1, world_size // fixed)} if open_axis else {})}
    # An open data-parallel axis takes what is left without being told.
    told = ["pp", "tp", *(axis for axis in ("dp_replicate", "dp_shard") if axis != open_axis)]
    found = []
    for axes in all_meshes(strategy, world_size):
        needed = _needed_settings(dataclasses.replace(candidate, mesh=axes))
        if needed is not None:
            settings = {axis: axes[axis] for axis in told if axes[axis] != asked[axis]} | needed
            distance = sum(abs(math.log(axes[axis] / asked[axis])) for axis in told)
            # Of two as near, the one with whole copies: rounded, so that equal sums are equal.
            found.append(((len(settings), round(distance, 6), axes["dp_shard"]), settings))
    return [settings for _, settings in sorted(found, key=lambda pair: pair[0])]


def show_settings(settings: Mapping[str, Any]) -> str:
    """ "tp=1 dp_shard=4", as `--set` reads them."""
    return " ".join(f"{key}={str(value).lower()}" for key, value in settings.items())


def _split_mesh(strategy: Strategy) -> tuple[int, str | None]:
    """The product of the sizes that the mesh gives, and the axis that it leaves open."""
    open_axis = next((axis for axis, size in strategy.mesh.items() if size == -1), None)
    return math.prod(size for size in strategy.mesh.values() if size != -1), open_axis


def all_meshes(strategy: Strategy, world_size: int) -> Iterator[dict[str, int]]:
    """All meshes of so many processes: of the strategy's own axes and data-parallel ones."""
    splitting = [axis for axis in ("pp", "tp") if axis in strategy.named_axes]
    # Without its only such axis a strategy would be another one.
    alone = splitting if len(splitting) == 1 and world_size > 1 else []
    kept = [axis for axis in alone if strategy.mesh[axis] != 1]
    free = {*splitting, *(axis for axis in strategy.traits.axes if axis == "dp_replicate")}
    choices = [divisors(world_size) if axis in free else [1] for axis in MESH_AXES]
    for pp, copies, _, tp in itertools.product(*choices):
        shard, odd = divmod(world_size, pp * copies * tp)
        if shard > 1 and "dp_shard" not in strategy.traits.axes:
            continue
        axes = dict(zip(MESH_AXES, (pp, copies, shard, tp), strict=True))
        if not odd and all(axes[axis] > 1 for axis in kept):
            yield axes


def _changes(candidate: Candidate, wanted: Settings) -> Settings:
    """Those of `wanted` that CONFIG has otherwise."""
    config = candidate.config
    return {key: value for key, value in wanted.items() if getattr(config, key) != value}


def _needed_settings(candidate: Candidate) -> Settings | None:
    """What of HARMLESS this layout needs: nothing, one of them or all; None where nothing helps."""
    changes = _changes(candidate, HARMLESS)
    for settings in ({}, *({key: value} for key, value in changes.items()), changes):
        config = candidate.config.model_copy(update=settings)
        tried = dataclasses.replace(candidate, config=config)
        with contextlib.suppress(UserError):
            build_layout(tried)
            cut_batch(tried)
            return settings
    return None
