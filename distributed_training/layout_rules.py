"""Which layouts exist: what schedules and models ask for, and the layouts nearest to one that
cannot be, as settings to type.

No torch import. What a refusal suggests is found by the rules that refuse, so it is accepted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from distributed_training.config import RunConfig
from distributed_training.sizes import SIZES, ModelSize
from distributed_training.strategy import MESH_AXES, Strategy

Settings = dict[str, Any]
"""CONFIG key -> value, to be put over what was asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleRule:
    """What one pipeline schedule asks for."""

    bubble: Callable[[int, int], float | None]
    """(pp, micro-batches) -> idle share of a step if all stages took equally long and a backward
    pass twice a forward one (the tutorial's closed_forms.py); None where there is no formula."""
    stages_per_rank: int = 1
    v_shaped: bool = False
    """Rank r holds stages r and 2 pp - 1 - r instead of r and pp + r."""
    splits_backward: bool = False
    """Whether the gradients of inputs and of weights are computed at different times."""
    minimum: Callable[[int], int] = lambda pp: 1
    """pp -> fewest micro-batches."""
    equal_rounds: bool = False
    """Whether the micro-batches must make max(1, m // pp) rounds of equal length."""


def _share(idle: int, busy: int) -> float:
    return idle / (busy + idle)


# Rules of torch.distributed.pipelining's schedules.
SCHEDULE_RULES: dict[str, ScheduleRule] = {
    "gpipe": ScheduleRule(bubble=lambda p, m: _share(p - 1, m)),
    "1f1b": ScheduleRule(bubble=lambda p, m: _share(p - 1, m), minimum=lambda p: p),
    "interleaved": ScheduleRule(
        bubble=lambda p, m: _share(p - 1 if m >= p else 2 * (p - m) + m - 1, 2 * m),
        stages_per_rank=2,
        equal_rounds=True,
    ),
    "zb-h1": ScheduleRule(
        bubble=lambda p, m: _share(2 * (p - 1) - (min(m, p) - 1), 3 * m),
        splits_backward=True,
        equal_rounds=True,
    ),
    "zb-v": ScheduleRule(
        bubble=lambda p, m: _share(p - 1, 6 * m) if m >= 2 * p - 1 else None,
        stages_per_rank=2,
        v_shaped=True,
        splits_backward=True,
    ),
}


def rule_of(config: RunConfig, strategy: Strategy) -> ScheduleRule:
    """The schedule's rule; DeepSpeed's pipeline engine has 1F1B only."""
    return SCHEDULE_RULES["1f1b" if strategy.engine == "deepspeed" else config.pipeline_schedule]


def read_cut(text: str, size: ModelSize, num_stages: int) -> list[int] | None:
    """The blocks of each stage that a `pipeline_cut` gives; None where it does not fit."""
    counts = [int(word) if word.strip().isdecimal() else 0 for word in text.split(",")]
    fits = len(counts) == num_stages and min(counts) > 0 and sum(counts) == size.num_layers
    return counts if fits else None


def nearest_layouts(
    strategy: Strategy,
    world_size: int,
    config: RunConfig | None,
    size: ModelSize | None,
    count: int = 3,
) -> list[Settings]:
    """Settings each of which makes a layout of `world_size` processes under `strategy`, those
    nearest to its mesh first: fewest settings, then the sum of the ratios' logarithms.

    A strategy has the axes of its mesh, and data-parallel ones. Without `config` and `size` the
    axes are all that is known.
    """
    mesh = strategy.mesh
    open_axis = _open_axis(strategy)
    fixed = math.prod(n for n in mesh.values() if n != -1)
    asked = {axis: n if n != -1 else max(1, world_size // fixed) for axis, n in mesh.items()}
    # An open data-parallel axis takes what is left without being told.
    told = ["pp", "tp", *(axis for axis in ("dp_replicate", "dp_shard") if axis != open_axis)]
    found = []
    for axes in _layouts(strategy, world_size, config, size):
        settings: Settings = {axis: axes[axis] for axis in told if axes[axis] != asked[axis]}
        settings |= _other_settings(strategy, config, size, axes)
        distance = sum(abs(math.log(axes[axis] / asked[axis])) for axis in told)
        # Of two as near, the one with whole copies: rounded, so that equal sums are equal.
        found.append(((len(settings), round(distance, 6), axes["dp_shard"]), settings))
    return [settings for _, settings in sorted(found, key=lambda pair: pair[0])[:count]]


def advise(
    strategy: Strategy,
    world_size: int,
    config: RunConfig | None,
    size: ModelSize | None,
    *,
    also: Iterable[Settings] = (),
    numbers_first: bool = False,
) -> str:
    """What to type instead: up to three layouts, or where there are none the numbers of processes
    that there are some for, and fsdp, which takes any number.

    `also`: further settings that help. `numbers_first`: name the numbers that would do for the
    mesh as it is before the layouts.
    """
    found = nearest_layouts(strategy, world_size, config, size)
    words = "; or ".join(map(show_settings, [*found, *also]))
    parts = [f"set {words}"] if words else []
    if numbers_first or not found:
        start = _start_others(strategy, world_size, config, size)
        if not start and not found:
            start = _start_near(strategy, world_size, config, size)
        parts = [start] * bool(start) + parts
    if not found:
        keys = (*MESH_AXES, "pipeline_cut", "deepspeed_config")
        given = {key: None for key in keys if getattr(config, key, None) is not None}
        parts.append("take fsdp" + (f" with {show_settings(given)}" if given else ""))
    return ", or ".join(parts)


def show_settings(settings: Mapping[str, Any]) -> str:
    """ "tp=1 dp_shard=4", as `--set` reads them."""
    return " ".join(f"{k}={'none' if v is None else v}" for k, v in settings.items())


def larger_model(
    config: RunConfig, strategy: Strategy, size: ModelSize, axes: Mapping[str, int]
) -> list[Settings]:
    """The next larger model that this layout exists for, with what else it needs; or nothing."""
    for name, other in sorted(SIZES.items(), key=lambda item: item[1].num_parameters):
        larger = other.num_parameters > size.num_parameters
        if larger and _fits(strategy, config, other, axes):
            return [{"model": name, **_other_settings(strategy, config, other, axes)}]
    return []


def _open_axis(strategy: Strategy) -> str | None:
    return next((axis for axis, size in strategy.mesh.items() if size == -1), None)


def _splitting_axes(strategy: Strategy) -> list[str]:
    """Which of pp and tp the strategy may have."""
    if strategy.engine == "deepspeed":
        return ["pp"] if "pipeline" in strategy.document else []
    return [axis for axis in ("pp", "tp") if axis in strategy.document["mesh"]]


def _layouts(
    strategy: Strategy, world_size: int, config: RunConfig | None, size: ModelSize | None
) -> Iterator[dict[str, int]]:
    """All layouts of `world_size` processes that strategy, schedule and model allow."""
    splitting = _splitting_axes(strategy)
    # Without its only such axis a strategy would be another one.
    kept = splitting if len(splitting) == 1 and world_size > 1 else []
    kept = [axis for axis in kept if strategy.mesh[axis] != 1]
    small = [n for n in range(1, math.isqrt(world_size) + 1) if world_size % n == 0]
    divisors = sorted({*small, *(world_size // n for n in small)})
    for pp, tp in itertools.product(
        divisors if "pp" in splitting else [1], divisors if "tp" in splitting else [1]
    ):
        rest, odd = divmod(world_size, pp * tp)
        if odd or ("pp" in kept and pp == 1) or ("tp" in kept and tp == 1):
            continue
        if _fits(strategy, config, size, {"pp": pp, "tp": tp}):
            for copies in divisors if strategy.engine == "native" else [1]:
                if rest % copies == 0:
                    yield dict(zip(MESH_AXES, (pp, copies, rest // copies, tp), strict=True))


def _fits(
    strategy: Strategy,
    config: RunConfig | None,
    size: ModelSize | None,
    axes: Mapping[str, int],
) -> bool:
    """Whether heads and blocks can be divided so; yes where the model is not known."""
    if config is None or size is None:
        return True
    stages = axes["pp"] * rule_of(config, strategy).stages_per_rank if axes["pp"] > 1 else 1
    return stages <= size.num_layers and size.num_heads % axes["tp"] == 0


def _other_settings(
    strategy: Strategy,
    config: RunConfig | None,
    size: ModelSize | None,
    axes: Mapping[str, int],
) -> Settings:
    """Settings besides the axes that this layout would be refused without."""
    needed: Settings = {}
    if config is None or size is None:
        return needed
    pp, rule = axes["pp"], rule_of(config, strategy)
    if config.sequence_parallel and config.seq_len % axes["tp"]:
        needed["sequence_parallel"] = "false"
    if pp > 1 and strategy.engine == "deepspeed":
        if config.pipeline_schedule != "1f1b":
            needed["pipeline_schedule"] = "1f1b"
    elif pp > 1:
        steps = max(config.grad_accum_steps, rule.minimum(pp))
        while rule.equal_rounds and steps % max(1, steps // pp):
            steps += 1
        if steps != config.grad_accum_steps:
            needed["grad_accum_steps"] = steps
        if rule.splits_backward and config.activation_checkpointing != "none":
            needed["activation_checkpointing"] = "none"
    if config.pipeline_cut is not None:
        stages = pp * rule.stages_per_rank
        if pp == 1 or read_cut(config.pipeline_cut, size, stages) is None:
            needed["pipeline_cut"] = None
    return needed


def _start_others(
    strategy: Strategy, world_size: int, config: RunConfig | None, size: ModelSize | None
) -> str:
    """ "start 5 or 25 processes": the numbers that the mesh fits as it is; "" without any."""
    mesh, open_axis = strategy.mesh, _open_axis(strategy)
    fixed = math.prod(n for n in mesh.values() if n != -1)
    if size is None or open_axis not in ("pp", "tp"):
        axes = {axis: max(1, n) for axis, n in mesh.items()}
        if not _fits(strategy, config, size, axes):
            return ""
        number = f"a multiple of {fixed}" if open_axis else str(fixed)
        return _show_start(number, _other_settings(strategy, config, size, axes))
    choices = []
    for n in range(2, max(size.num_heads, size.num_layers) + 1):
        axes = {**mesh, open_axis: n}
        if _fits(strategy, config, size, axes):
            choices.append((fixed * n, _other_settings(strategy, config, size, axes)))
    if not choices:
        return ""
    choices.sort(key=lambda choice: (len(choice[1]), abs(math.log(choice[0] / world_size))))
    settings = choices[0][1]
    alike = sorted([number for number, other in choices if other == settings][:4])
    return _show_start(" or ".join(map(str, alike)), settings)


def _start_near(
    strategy: Strategy, world_size: int, config: RunConfig | None, size: ModelSize | None
) -> str:
    """The nearest number of processes that has a layout, and what makes it; "" without any."""
    # Every num_heads-th number can be divided over tp, every second one over pp.
    for gap in range(1, size.num_heads + 1) if size is not None else ():
        for other in (world_size - gap, world_size + gap):
            found = nearest_layouts(strategy, other, config, size, count=1) if other > 1 else []
            if found:
                return _show_start(str(other), found[0])
    return ""


def _show_start(number: str, settings: Settings) -> str:
    also = f" and set {show_settings(settings)}" if settings else ""
    return f"start {number} processes{also}"
