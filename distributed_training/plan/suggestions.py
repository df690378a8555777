"""The possible layouts nearest to an impossible one, as settings to type. No torch import.

What a refusal suggests has been tried on the rules that refuse, so it is accepted.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distributed_training.models import find_model
from distributed_training.plan.batch import cut_batch
from distributed_training.plan.layouts import build_layout
from distributed_training.plan.schedules import divisors, schedule_of
from distributed_training.settings.config import AUTO, RunConfig, replace
from distributed_training.settings.errors import UserError
from distributed_training.settings.strategies import MESH_AXES, Strategy

Settings = dict[str, Any]  # CONFIG key -> value, to be put over what was asked
OPEN_BATCH: Settings = {"micro_batch_size": AUTO, "num_microbatches": AUTO}
# With these values a layout is refused for its axes alone.
HARMLESS: Settings = {
    "sequence_parallel": False,
    "activation_checkpointing": "none",
    "pipeline_cut": None,
    "pipeline_schedule": AUTO,
    **OPEN_BATCH,
}
# With these fsdp takes any number of processes.
FSDP: Settings = dict.fromkeys((*MESH_AXES, "pipeline_cut", "deepspeed_config")) | OPEN_BATCH


def advise(
    strategy: Strategy,
    world_size: int,
    config: RunConfig,
    *,
    also: Sequence[Settings] = (),
    numbers_first: bool = False,
) -> str:
    """What to type instead: up to three layouts and what is in `also`, or where there are none
    numbers of processes that have layouts, and fsdp, which takes any number.

    `numbers_first`: name the numbers that fit the mesh as it is before the layouts.
    """
    found, start, fsdp = nearest_layouts(strategy, world_size, config), "", ""
    if numbers_first or not found:
        start = _start_others(strategy, world_size, config, as_it_is=bool(found))
    if not found:
        given = show_settings(_changes(config, FSDP))
        fsdp = "take fsdp" + (f" with {given}" if given else "")
    words = "; or ".join(map(show_settings, [*found, *also]))
    return ", or ".join(filter(None, [start, f"set {words}" if words else "", fsdp]))


def nearest_layouts(
    strategy: Strategy, world_size: int, config: RunConfig, count: int = 3
) -> list[Settings]:
    """Settings each of which makes a layout of `world_size` processes under `strategy`, those
    nearest to its mesh first: fewest settings, then the sum of the ratios' logarithms.
    """
    fixed, open_axis = split_mesh(strategy)
    asked = {**strategy.mesh, **({open_axis: max(1, world_size // fixed)} if open_axis else {})}
    # An open data-parallel axis takes what is left without being told.
    told = ["pp", "tp", *(axis for axis in ("dp_replicate", "dp_shard") if axis != open_axis)]
    found = []
    for axes in _meshes(strategy, world_size):
        needed = _needed_settings(strategy, config, axes)
        if needed is not None:
            settings = {axis: axes[axis] for axis in told if axes[axis] != asked[axis]} | needed
            distance = sum(abs(math.log(axes[axis] / asked[axis])) for axis in told)
            # Of two as near, the one with whole copies: rounded, so that equal sums are equal.
            found.append(((len(settings), round(distance, 6), axes["dp_shard"]), settings))
    return [settings for _, settings in sorted(found, key=lambda pair: pair[0])[:count]]


def _start_others(strategy: Strategy, world_size: int, config: RunConfig, *, as_it_is: bool) -> str:
    """ "start 5 or 25 processes": up to four numbers near `world_size` that need the fewest
    settings, none of them an axis where the mesh is to stay `as_it_is`; "" without any.
    """
    fixed, _ = split_mesh(strategy)
    step = fixed if as_it_is else 1
    # Every num_heads-th number can be divided over tp, every second one over pp.
    furthest = max(world_size, step) + find_model(config.model).size.num_heads
    choices = []
    for number in range(max(step, 2), furthest + 1, step):
        for settings in nearest_layouts(strategy, number, config, count=1):
            if not (as_it_is and settings.keys() & MESH_AXES):
                distance = abs(math.log(number / world_size))
                choices.append((len(settings), distance, number, settings))
    if not choices:
        return ""
    choices.sort(key=lambda choice: choice[:3])
    best = choices[0][-1]
    numbers = sorted([number for *_, number, settings in choices if settings == best][:4])
    also = f" and set {show_settings(best)}" if best else ""
    return f"start {' or '.join(map(str, numbers))} processes{also}"


def show_settings(settings: Mapping[str, Any]) -> str:
    """ "tp=1 dp_shard=4", as `--set` reads them."""
    return " ".join(f"{key}={str(value).lower()}" for key, value in settings.items())


def larger_model(config: RunConfig, strategy: Strategy, axes: Mapping[str, int]) -> list[Settings]:
    """The next larger model that this layout exists for, with what else it needs; or nothing."""
    model = find_model(config.model)
    sizes = sorted(model.named_sizes().items(), key=lambda item: item[1].num_parameters)
    for name, size in sizes:
        if size.num_parameters > model.size.num_parameters:
            needed = _needed_settings(strategy, replace(config, model=name), axes)
            if needed is not None:
                return [{"model": name, **needed}]
    return []


def split_mesh(strategy: Strategy) -> tuple[int, str | None]:
    """The product of the sizes that the mesh gives, and the axis that it leaves open."""
    open_axis = next((axis for axis, size in strategy.mesh.items() if size == -1), None)
    return math.prod(size for size in strategy.mesh.values() if size != -1), open_axis


def _meshes(strategy: Strategy, world_size: int) -> Iterator[dict[str, int]]:
    """All meshes of so many processes: of the strategy's own axes and data-parallel ones."""
    splitting = [axis for axis in ("pp", "tp") if axis in strategy.named_axes]
    # Without its only such axis a strategy would be another one.
    alone = splitting if len(splitting) == 1 and world_size > 1 else []
    kept = [axis for axis in alone if strategy.mesh[axis] != 1]
    free = {*splitting, *(axis for axis in strategy.traits.axes if axis == "dp_replicate")}
    choices = [divisors(world_size) if axis in free else [1] for axis in MESH_AXES]
    for pp, copies, _, tp in itertools.product(*choices):
        shard, odd = divmod(world_size, pp * copies * tp)
        axes = dict(zip(MESH_AXES, (pp, copies, shard, tp), strict=True))
        if not odd and all(axes[axis] > 1 for axis in kept):
            yield axes


def _changes(config: RunConfig, wanted: Settings) -> Settings:
    """Those of `wanted` that CONFIG has otherwise."""
    return {key: value for key, value in wanted.items() if getattr(config, key) != value}


def _needed_settings(
    strategy: Strategy, config: RunConfig, axes: Mapping[str, int]
) -> Settings | None:
    """Fewest settings besides the axes that this layout would be refused without; None where
    the model cannot be divided so.
    """
    size, schedule = find_model(config.model).size, schedule_of(config, strategy, axes["pp"])
    if size.num_heads % axes["tp"] or axes["pp"] * schedule.stages_per_rank > size.num_layers:
        return None
    changes = _changes(config, HARMLESS)
    if config.pipeline_schedule in strategy.traits.schedules:
        changes.pop("pipeline_schedule", None)
    for count in range(len(changes) + 1):
        for keys in itertools.combinations(changes, count):
            settings = {key: changes[key] for key in keys}
            with contextlib.suppress(UserError):
                tried = replace(config, **settings) if settings else config
                build_layout(tried, strategy, size, axes)
                cut_batch(tried, axes, schedule)
                return settings
    return None
