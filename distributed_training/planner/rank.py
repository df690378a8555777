"""Rank every layout of every strategy for one CONFIG, the fastest that fits first. No torch
import."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from tqdm import tqdm

from distributed_training.plan.plan import Draft
from distributed_training.plan.schedules import SCHEDULES
from distributed_training.planner.choose import lay_out
from distributed_training.planner.layouts import OPEN, Settings, all_meshes, show_settings
from distributed_training.planner.model import choose_model
from distributed_training.predict.predict import Cluster, Prediction, predict
from distributed_training.settings.config import AUTO, Request, with_values
from distributed_training.settings.errors import UserError
from distributed_training.settings.keys import read_keys
from distributed_training.settings.request import defaults_for
from distributed_training.settings.strategies import (
    Strategy,
    list_strategies,
    load_strategy,
    strategy_options,
)

# Difference in time below which the simpler layout is chosen. It is about the error of predictions.
ALIKE = 0.03
ALIKE_ON_CPU = 0.2
ALIKE_UNVALIDATED = 0.2  # on several nodes, and for models and GPUs that were not measured
SAFE = 0.05  # how much longer the layout with the least memory may take
NEAR_BEST = 0.95  # share of the best tokens/s that is enough
MOST_BATCH = 8  # power of two of the largest batch size to test
MOST_COUNTS = 4  # numbers of micro-batches to test per pipeline schedule


def rank_layouts(
    build: Callable[[str], Request], cluster: Cluster, asked: str = AUTO, *, only: str = AUTO
) -> list[Prediction]:
    """Return all layouts that can start, the best first. `build` returns CONFIG under a strategy's
    name and raises UserError if they are incompatible. Algorithms that compute different results
    are included only if `asked` names them. On CPUs, strategies that offload state to the host are
    included only if `asked` names them or CONFIG has a DeepSpeed JSON. `only` names the single
    strategy to rank."""
    choices: dict[object, Prediction] = {}
    names = tuple(list_strategies()) if only == AUTO else (only,)
    for name in with_progress(names, "strategies"):
        if name != asked and any(key.work for key in read_keys(strategy_options(name)).values()):
            continue
        with contextlib.suppress(UserError):
            for plan in enumerate_plans(build(name), cluster):
                # The key is equal for two names of one layout.
                strategy = plan.strategy
                named = name == asked or plan.config.deepspeed_config
                if strategy.steps_on_host and not named and not cluster.machine.num_gpus:
                    continue
                engine = name if strategy.traits.takes_json else strategy.engine
                schedule = plan.config.pipeline_schedule if plan.mesh["pp"] > 1 else None
                key = (engine, *plan.mesh.values(), schedule, plan.batch.num_microbatches)
                known = choices.get(key)
                if known is None or _detours(plan) < _detours(known.plan):
                    choices[key] = predict(plan, cluster.rates)
    return sorted(choices.values(), key=lambda choice: choice.order)


def _detours(plan: Draft) -> tuple[int, bool]:
    """Return a sort key for two names of one layout. The name that needs fewer settings comes
    first, and for sharded replicas (HSDP) the name fsdp."""
    shards = plan.mesh["dp_shard"] > 1 and (plan.mesh["pp"], plan.mesh["tp"]) == (1, 1)
    return len(settings_of(plan)), shards and plan.strategy.mesh["dp_shard"] == 1


def with_progress(items: Sequence[Any], what: str) -> Iterable[Any]:
    """Show a progress bar in a terminal after two seconds."""
    form = "{desc} {bar} {n_fmt}/{total_fmt}"
    return tqdm(items, what, bar_format=form, leave=False, disable=None, delay=2)


def enumerate_plans(config: Request, cluster: Cluster) -> Iterator[Draft]:
    """Yield drafts of every mesh, with the schedules and some numbers of micro-batches that CONFIG
    leaves open."""
    strategy = load_strategy(config)
    config = choose_model(config, cluster.machine, cluster.num_processes, strategy, [])
    cut_is_open = (config.micro_batch_size, config.num_microbatches) == (AUTO, AUTO)
    for mesh in all_meshes(strategy, cluster.num_processes):
        if any(getattr(config, axis) not in (None, -1, size) for axis, size in mesh.items()):
            continue
        schedules: list[str] = [config.pipeline_schedule]
        if mesh["pp"] > 1 and schedules == [AUTO]:
            # A search for orders takes 1 to 2 s, so it runs only on request.
            schedules = [name for name in strategy.traits.schedules if not SCHEDULES[name].searched]
        for schedule in schedules:
            with contextlib.suppress(UserError):
                scheduled = config.model_copy(update={"pipeline_schedule": schedule})
                first = lay_out(scheduled, cluster, strategy, mesh)
                yield first
                if first.schedule.searched or not cut_is_open:
                    continue
                # With fewer micro-batches, activations would need more memory than `batch_size`
                # sequences under dp.
                for count in _more_microbatches(first)[:MOST_COUNTS]:
                    with contextlib.suppress(UserError):
                        counted = scheduled.model_copy(update={"num_microbatches": count})
                        yield lay_out(counted, cluster, strategy, mesh)


def _more_microbatches(plan: Draft) -> list[int]:
    """Return larger numbers of micro-batches that the plan's schedule accepts."""
    batch = plan.batch
    sequences = batch.micro_batch_size * batch.num_microbatches
    counts = plan.schedule.counts(plan.mesh["pp"], sequences)
    return [count for count in counts if count > batch.num_microbatches]


def settings_of(plan: Draft) -> dict[str, Any]:
    """Return the settings besides `strategy` that give this layout."""
    named_mesh = plan.strategy.mesh
    mesh = plan.mesh
    settings: dict[str, Any] = {
        axis: size for axis, size in mesh.items() if named_mesh[axis] not in (-1, size)
    }
    # An open axis gets all remaining processes, which may not be intended. Only one axis may be
    # open.
    open_axes = [axis for axis in mesh if named_mesh[axis] == -1]
    if plan.num_processes > 1 and any(mesh[axis] == 1 for axis in open_axes):
        settings |= {axis: size for axis, size in mesh.items() if size > 1}
    if len(open_axes) > 1:
        settings |= {axis: mesh[axis] for axis in open_axes}
    schedule = plan.config.pipeline_schedule
    if mesh["pp"] > 1 and schedule != plan.strategy.traits.schedules[0]:
        settings["pipeline_schedule"] = schedule
    if plan.requested.num_microbatches == plan.batch.num_microbatches:
        settings["num_microbatches"] = plan.batch.num_microbatches
    return settings


def layout_name(plan: Draft) -> str:
    """Return a name such as "3d pp=4 tp=2 1f1b m8": strategy, axes if the strategy does not imply
    them, schedule and number of micro-batches."""
    words = [plan.strategy.name]
    if settings_of(plan).keys() & plan.mesh.keys():
        words += [f"{axis}={size}" for axis, size in plan.mesh.items() if size > 1]
    if plan.mesh["pp"] > 1:
        words.append(plan.config.pipeline_schedule)
    if plan.batch.num_microbatches > 1:
        words.append(f"m{plan.batch.num_microbatches}")
    return " ".join(words)


def as_chosen(config: Request, name: str) -> Request:
    """Return CONFIG under a strategy that "auto" may choose. Keys that are set stay, even if the
    strategy does not accept them. Raises UserError for an engine that adds its own options."""
    if strategy_options(name).model_fields:
        raise UserError(f"strategy={name!r} is never chosen by auto", fix="set strategy to it")
    defaults = {"engine_options": {}, **defaults_for(config, name)}
    return with_values(config, strategy=name, **defaults)


def what_fits(plan: Draft, cluster: Cluster) -> list[str]:
    """Return settings with which a plan's work fits its cluster: more micro-batches, recomputation,
    a quantized base or smaller optimizer state, and the fastest other strategy."""
    config = plan.config

    def fits(**settings: object) -> bool:
        # The settings may decide if a step is one CUDA graph.
        decided = config.to_user_words() | {"cuda_graphs": plan.requested.cuda_graphs, **settings}
        request = plan.requested.model_copy(update=decided)
        with contextlib.suppress(UserError):
            draft = lay_out(request, cluster, plan.strategy, plan.mesh)
            return predict(draft, None).room == "yes"
        return False

    suggestions: list[Settings] = []
    for count in _more_microbatches(plan):
        if fits(num_microbatches=count, micro_batch_size=AUTO):
            suggestions.append({"num_microbatches": count})
            break
    if config.activation_checkpointing == "none" and fits(activation_checkpointing="full"):
        suggestions.append({"activation_checkpointing": "full"})
    if config.lora_rank and config.base_dtype in (None, AUTO) and fits(base_dtype="nf4"):
        suggestions.append({"base_dtype": "nf4"})
    opened = OPEN | {"pipeline_schedule": AUTO}
    decided = {"model": config.model, "batch_size": config.batch_size}
    request = plan.requested.model_copy(update=decided | opened)
    best = best_layout(functools.partial(as_chosen, request), cluster)
    if best and best.fits and best.plan.strategy.name != plan.strategy.name:
        suggestions.append({"strategy": best.plan.strategy.name, **settings_of(best.plan)})
    if not suggestions and not config.lora_rank and fits(optimizer="adamw-bf16"):
        suggestions.append({"optimizer": "adamw-bf16"})
    return [f"set {show_settings(settings)}" for settings in suggestions]


def best_layout(build: Callable[[str], Request], cluster: Cluster) -> Prediction | None:
    """Return the simplest of the fastest layouts that fit, or None. `build` is described in
    `rank_layouts`."""
    # The checks of the run report a lack of host memory.
    choices = [
        choice
        for choice in rank_layouts(build, cluster)
        if choice.room_on_gpu != "no" and choice.memory.needed_bytes < cluster.below_bytes
    ]
    return first_choice(choices) if choices else None


def first_choice(choices: Sequence[Prediction]) -> Prediction:
    """Return the simplest of the layouts that are as fast as the best, within prediction error."""
    best = choices[0]
    alike, among_simple = (ALIKE, ALIKE) if best.validated else (ALIKE_UNVALIDATED, SAFE)
    if best.plan.machine.num_gpus == 0:
        alike = among_simple = ALIKE_ON_CPU
    near = _within(choices, best, alike)
    fewest = min(len(settings_of(choice.plan)) for choice in near)
    simple = [choice for choice in near if len(settings_of(choice.plan)) == fewest]
    names = list(list_strategies())
    return min(
        _within(simple, simple[0], among_simple),
        key=lambda choice: names.index(choice.plan.strategy.name),
    )


def _within(choices: Sequence[Prediction], best: Prediction, share: float) -> list[Prediction]:
    """Return the layouts that fit as well as `best` and take at most `share` longer."""
    room, seconds = best.order
    return [choice for choice in choices if choice.order <= (room, seconds * (1 + share))]


def pick(choices: Sequence[Prediction]) -> list[tuple[str, Prediction]]:
    """Return the layouts of a ranking to show first, each with its labels."""
    best = choices[0]
    safest = min(_within(choices, best, SAFE), key=lambda choice: choice.memory.needed_bytes)
    labeled: dict[int, tuple[list[str], Prediction]] = {}
    for label, choice in (("first", first_choice(choices)), ("fastest", best), ("safest", safest)):
        labeled.setdefault(id(choice), ([], choice))[0].append(label)
    return [(", ".join(labels), choice) for labels, choice in labeled.values()]


def choose_spread(
    config: Request, cluster: Cluster, strategy: Strategy | None, notes: list[str]
) -> tuple[Request, Strategy]:
    """Choose the strategy and the batch size that are predicted to be fastest, if they are "auto".
    `strategy` is None if it is "auto"."""
    if strategy is None:
        few = 8 if config.batch_size == AUTO else config.batch_size
        build = functools.partial(as_chosen, config.model_copy(update={"batch_size": few}))
        best = best_layout(build, cluster)
        if best is None:
            # Raise the most specific error. If there is none, the memory does not suffice.
            plainest = "dp"
            if config.deepspeed_config:
                plainest = "zero2"
            elif config.tp not in (None, 1) or config.pp not in (None, 1):
                plainest = "3d"
            lay_out(build(plainest), cluster)
            what = f"no strategy can train {config.model} here with batch_size={few}"
            raise UserError(what, fix="set a smaller batch_size, or activation_checkpointing=full")
        settings = settings_of(best.plan)
        chosen = f"the planner chose {best.plan.strategy.name} {show_settings(settings)}".rstrip()
        why = "the first strategy that fits"
        if best.step is not None:
            why = f"predicted {best.step.seconds:.3g} s per step"
        notes.append(f"{chosen} ({why})")
        settings |= {"batch_size": config.batch_size}
        config = best.plan.requested.model_copy(update=settings)
        strategy = load_strategy(config)
    if config.batch_size == AUTO:
        # The smallest power of two that fits and reaches NEAR_BEST of the best predicted tokens/s
        speeds: dict[int, float] = {}
        for size in with_progress([2**power for power in range(MOST_BATCH + 1)], "batch sizes"):
            with contextlib.suppress(UserError):
                sized = config.model_copy(update={"batch_size": size})
                prediction = predict(lay_out(sized, cluster, strategy), cluster.rates)
                is_below = prediction.memory.needed_bytes < cluster.below_bytes
                if prediction.room == "yes" and is_below:
                    speeds[size] = prediction.tokens_per_s or size
        enough = NEAR_BEST * max(speeds.values(), default=0.0)
        size = next((size for size, speed in speeds.items() if speed >= enough), 1)
        notes.append(
            f"batch_size is {size}, the smallest value that is predicted to keep a GPU busy"
        )
        config = config.model_copy(update={"batch_size": size})
    return config, strategy
