"""Every layout of every strategy for one CONFIG, the quickest that fits first. No torch import."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from distributed_training.advise.cluster import Cluster, machine_rates
from distributed_training.models import find_model
from distributed_training.plan.choose import choose_model, choose_settings
from distributed_training.plan.draft import lay_out
from distributed_training.plan.machine import Machine
from distributed_training.plan.mesh import all_meshes, divides, fill_mesh, show_settings
from distributed_training.plan.plan import Plan
from distributed_training.plan.schedules import SCHEDULES, schedule_of
from distributed_training.predict.memory import estimate_memory
from distributed_training.predict.predict import Prediction, fits, fits_gpu, predict
from distributed_training.settings.config import AUTO, RunConfig
from distributed_training.settings.config import replace as with_values
from distributed_training.settings.errors import UserError
from distributed_training.settings.keys import read_keys
from distributed_training.settings.strategies import (
    MESH_AXES,
    list_strategies,
    load_strategy,
    strategy_defaults,
    strategy_options,
)

# Difference in time below which the simpler layout is taken: about what predictions are off by.
ALIKE, ALIKE_ON_CPU = 0.03, 0.2
BUSY, MOST_BATCH = 0.95, 8  # share of the best tokens/s that is enough; power of two
MOST_COUNTS = 4  # cuts of the batch that are looked at under one pipeline schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One layout, and what it would be like."""

    plan: Plan
    prediction: Prediction

    @property
    def order(self) -> tuple[bool, float]:
        """What fits first, then by time; in the strategies' order where that is not known."""
        step = self.prediction.step
        return (not self.prediction.fits, step.seconds if step else 0.0)


def rank_layouts(
    build: Callable[[str], RunConfig], cluster: Cluster, asked: str = AUTO
) -> list[Choice]:
    """All layouts that start, the best first; `build` gives CONFIG under a strategy's name and
    raises UserError where it does not go with it. An algorithm that computes something else is
    among them only where it is `asked` for.
    """
    choices: dict[object, Choice] = {}
    for name in with_progress(tuple(list_strategies()), "strategies"):
        if name != asked and any(key.work for key in read_keys(strategy_options(name)).values()):
            continue
        with contextlib.suppress(UserError):
            for plan in enumerate_plans(build(name), cluster):
                key = _identity(plan)
                known = choices.get(key)
                if known is None:
                    prediction = predict(plan, cluster.rates, cluster.processes_a_node)
                    choices[key] = Choice(plan=plan, prediction=prediction)
                # Of two names for one layout, that which needs fewer settings.
                elif len(settings_of(plan)) < len(settings_of(known.plan)):
                    choices[key] = replace(known, plan=plan)
    return sorted(choices.values(), key=lambda choice: choice.order)


def with_progress(items: Sequence[Any], what: str) -> Iterable[Any]:
    """A bar in a terminal where they take longer than two seconds."""
    form = "{desc} {bar} {n_fmt}/{total_fmt}"
    return tqdm(items, what, bar_format=form, leave=False, disable=None, delay=2)


def enumerate_plans(config: RunConfig, cluster: Cluster) -> Iterator[Plan]:
    """Drafts of every mesh of a strategy on a cluster, with every schedule and some cuts of the
    batch where CONFIG leaves those open.
    """
    strategy, machine = load_strategy(config), cluster.machine
    config = choose_model(config, machine, [])
    size = find_model(config.model).size
    asked = {axis: getattr(config, axis) for axis in MESH_AXES}
    for mesh in all_meshes(strategy, cluster.num_processes):
        if any(size not in (None, -1, mesh[axis]) for axis, size in asked.items()):
            continue
        schedules: list[str] = [config.pipeline_schedule]
        if mesh["pp"] > 1 and schedules == [AUTO]:
            # Searching for orders takes a second or two for each: only where it is asked for.
            schedules = [name for name in strategy.traits.schedules if not SCHEDULES[name].searched]
        for schedule in schedules:
            with contextlib.suppress(UserError):
                own = config
                if schedule != config.pipeline_schedule:
                    own = with_values(config, pipeline_schedule=schedule)
                if not divides(size, schedule_of(own, strategy, mesh["pp"]), mesh):
                    continue
                own = choose_settings(own, machine, strategy, mesh, [])
                first = lay_out(own, strategy, mesh, machine, cluster.processes_a_node)
                yield first
                for count in _other_counts(own, first):
                    cut = with_values(own, num_microbatches=count)
                    with contextlib.suppress(UserError):
                        yield lay_out(cut, strategy, mesh, machine, cluster.processes_a_node)


def _other_counts(config: RunConfig, first: Plan) -> list[int]:
    """More micro-batches than "auto" takes; fewer would hold more than `batch_size` sequences do
    under dp."""
    if config.micro_batch_size != AUTO or config.num_microbatches != AUTO:
        return []
    if first.schedule.searched:  # a second or two for each
        return []
    pp = first.mesh["pp"]
    sequences = first.batch.global_batch_size // first.batch.num_replicas
    counts = schedule_of(config, first.strategy, pp).counts(pp, sequences)
    more = [count for count in counts if count > first.batch.num_microbatches]
    return more[:MOST_COUNTS]


def _identity(plan: Plan) -> object:
    """What is equal for two names of one layout."""
    axes, schedule = tuple(plan.mesh.values()), plan.config.pipeline_schedule
    own = plan.strategy.name if plan.strategy.traits.takes_deepspeed_json else plan.strategy.engine
    split = plan.mesh["pp"] > 1
    return own, axes, schedule if split else None, plan.batch.num_microbatches


def settings_of(plan: Plan) -> dict[str, Any]:
    """The keys besides `strategy` that give this layout."""
    asked, found = plan.strategy.mesh, dict[str, Any]()
    for axis in MESH_AXES:
        if asked[axis] not in (-1, plan.mesh[axis]):
            found[axis] = plan.mesh[axis]
    # An open axis takes what is left, which may be another than is meant.
    rest = [axis for axis in MESH_AXES if asked[axis] == -1]
    if rest and plan.mesh[rest[0]] == 1 and plan.num_processes > 1:
        found |= {axis: size for axis, size in plan.mesh.items() if size > 1}
    if plan.mesh["pp"] > 1 and plan.config.pipeline_schedule != plan.strategy.traits.schedules[0]:
        found["pipeline_schedule"] = plan.config.pipeline_schedule
    if plan.requested.num_microbatches == plan.batch.num_microbatches:
        found["num_microbatches"] = plan.batch.num_microbatches
    return found


def under_strategy(config: RunConfig, name: str) -> RunConfig:
    """The same work under another strategy: its defaults, and open axes and micro-batches."""
    opened = {**dict.fromkeys(MESH_AXES), "deepspeed_config": None, "pipeline_cut": None}
    opened |= {"micro_batch_size": AUTO, "num_microbatches": AUTO, "pipeline_schedule": AUTO}
    given = dict(config)
    defaults = {
        key: value for key, value in strategy_defaults(name).items() if given[key] in (None, AUTO)
    }
    if name != config.strategy:
        opened |= {"engine_options": {}, "engine_work": ()}
    return with_values(config, strategy=name, **opened, **defaults)


def what_fits(plan: Plan) -> list[str]:
    """What to set so that a plan's work fits its machine: the same strategy with more micro-batches
    or with recomputation, then the quickest of all."""
    found, pp = [], plan.mesh["pp"]
    sequences = plan.batch.global_batch_size // plan.batch.num_replicas
    for count in plan.schedule.counts(pp, sequences):
        cut = {"num_microbatches": count, "micro_batch_size": sequences // count}
        smaller = replace(plan, batch=plan.batch.model_copy(update=cut), orders=None)
        if count > plan.batch.num_microbatches and fits(plan, estimate_memory(smaller)):
            found.append(f"set num_microbatches={count}")
            break
    if plan.config.activation_checkpointing == "none" and not plan.schedule.splits_backward:
        again = with_values(plan.config, activation_checkpointing="full")
        if fits(plan, estimate_memory(replace(plan, config=again))):
            found.append("set activation_checkpointing=full")
    decided = {"model": plan.config.model, "batch_size": plan.config.batch_size}
    work = functools.partial(under_strategy, with_values(plan.requested, **decided))
    best = best_layout(work, plan.machine, plan.num_processes, plan.processes_here)
    if best and best.prediction.fits and best.plan.strategy.name != plan.strategy.name:
        settings = {"strategy": best.plan.strategy.name, **settings_of(best.plan)}
        found.append(f"set {show_settings(settings)}")
    return found


def best_layout(
    build: Callable[[str], RunConfig],
    machine: Machine,
    num_processes: int,
    processes_here: int,
    below_bytes: int | None = None,
) -> Choice | None:
    """The simplest of the quickest layouts that fit these processes, and that need less of a GPU
    than `below_bytes`; None without. `build` as for `rank_layouts`."""
    cluster = Cluster(
        nodes=num_processes // processes_here,
        processes_a_node=processes_here,
        machine=machine,
        rates=machine_rates(machine, processes_here),
        name="",
    )
    least = below_bytes or sys.maxsize
    choices = [
        choice for choice in rank_layouts(build, cluster)
        if fits_gpu(choice.plan, choice.prediction.memory)
        and choice.prediction.memory.needed_bytes < least
    ]  # fmt: skip
    # What the host lacks is for the run's own checks to say.
    choices = [choice for choice in choices if choice.prediction.fits] or choices
    if not choices:
        return None
    most = choices[0].order[1] * (1 + (ALIKE if machine.num_gpus else ALIKE_ON_CPU))
    alike = [choice for choice in choices if choice.order[1] <= most]
    names = list(list_strategies())
    return min(alike, key=lambda c: (len(settings_of(c.plan)), names.index(c.plan.strategy.name)))


def choose_spread(
    config: RunConfig, machine: Machine, num_processes: int, processes_here: int, notes: list[str]
) -> RunConfig:
    """Decide "auto" for strategy and batch_size: what is predicted to be quickest here, by figures
    that nothing has confirmed on this machine.
    """
    places = machine, num_processes, processes_here
    if config.strategy == AUTO:
        few = 8 if config.batch_size == AUTO else config.batch_size
        build = functools.partial(as_chosen, with_values(config, batch_size=few))
        best = best_layout(build, *places, config.below_bytes)
        if best is None:
            own_axes = [axis for axis in ("pp", "tp") if getattr(config, axis) not in (None, 1)]
            plainest = "zero2" if config.deepspeed_config else "3d" if own_axes else "dp"
            raise _none_found(build(plainest), *places)
        name, settings = best.plan.strategy.name, settings_of(best.plan)
        said = f"strategy is {show_settings({'strategy': name, **settings}).partition('=')[2]}"
        step = best.prediction.step
        why = "the first that fits" if step is None else f"predicted {step.seconds:.3g} s a step"
        notes.append(f"{said}, the planner's choice: {why}")
        config = with_values(as_chosen(config, name), **settings)
    if config.batch_size == AUTO:
        size = _busy_batch(config, *places)
        notes.append(f"batch_size is {size}: the fewest sequences that keep a GPU busy, predicted")
        config = with_values(config, batch_size=size)
    return config


def as_chosen(config: RunConfig, name: str) -> RunConfig:
    """CONFIG under a strategy that "auto" may become: what is set stays, whether or not the
    strategy takes it. Raises UserError for one whose engine has options of its own.
    """
    if strategy_options(name).model_fields:
        raise UserError(f"strategy={name!r} is never chosen by auto", fix="set strategy to it")
    given = dict(config)
    defaults = {
        key: value for key, value in strategy_defaults(name).items() if given[key] in (None, AUTO)
    }
    return with_values(config, strategy=name, from_defaults=tuple(defaults), **defaults)


def _none_found(
    config: RunConfig, machine: Machine, num_processes: int, processes_here: int
) -> UserError:
    """Why "auto" finds no strategy; `config` is under the one whose refusal says most."""
    strategy = load_strategy(config)
    mesh = fill_mesh(strategy, num_processes, config)
    own = choose_settings(config, machine, strategy, mesh, [])
    lay_out(own, strategy, mesh, machine, processes_here)
    what = (
        f"strategy='auto' finds none that fits {config.model} with batch_size={config.batch_size}"
    )
    return UserError(what, fix="set a smaller batch_size, or activation_checkpointing=full")


def _busy_batch(
    config: RunConfig, machine: Machine, num_processes: int, processes_here: int
) -> int:
    """The smallest power of two within BUSY of the best predicted tokens/s of those that fit."""
    speeds: dict[int, float] = {}
    strategy = load_strategy(config)
    mesh = fill_mesh(strategy, num_processes, config)
    own = choose_settings(config, machine, strategy, mesh, [])
    for size in with_progress([2**power for power in range(MOST_BATCH + 1)], "batch sizes"):
        with contextlib.suppress(UserError):
            tried = with_values(own, batch_size=size)
            plan = lay_out(tried, strategy, mesh, machine, processes_here)
            found = predict(plan, machine_rates(machine, processes_here))
            least = config.below_bytes or sys.maxsize
            if found.fits and found.memory.needed_bytes < least:
                speeds[size] = found.tokens_per_s or size
    best = max(speeds.values(), default=0.0)
    return next((size for size, speed in speeds.items() if speed >= BUSY * best), 1)
