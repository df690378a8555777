"""Rank the layouts of all strategies for one CONFIG. Layouts that fit come first, sorted from
fastest to slowest. This module does not import torch."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from distributed_training.models import ModelSpec
from distributed_training.plan.plan import Draft
from distributed_training.plan.schedules import SCHEDULES
from distributed_training.planner.choose import choose_model, lay_out
from distributed_training.planner.layouts import (
    OPEN,
    Candidate,
    Settings,
    all_meshes,
    show_settings,
)
from distributed_training.predict.predict import Cluster, Prediction, predict
from distributed_training.settings.config import AUTO, Request, with_values
from distributed_training.settings.errors import UserError
from distributed_training.settings.keys import read_keys
from distributed_training.settings.strategies import (
    Strategy,
    defaults_for,
    list_strategies,
    load_strategy,
    strategy_options,
)

# Relative difference in step time below which the simpler layout is chosen. The value is about as
# large as the prediction error.
ALIKE = 0.03
ALIKE_ON_CPU = 0.2
ALIKE_UNVALIDATED = 0.2  # on several nodes, and for models and GPUs that were not measured
SAFE = 0.05  # maximum relative increase in step time for the layout with the least memory
NEAR_BEST = 0.95  # fraction of the best tokens/s that a batch size must reach
MOST_BATCH = 8  # the largest batch size to test is 2 to this power
MOST_COUNTS = 4  # maximum number of micro-batch counts to test per pipeline schedule


def rank_layouts(
    build: Callable[[str], Request], cluster: Cluster, asked: str = AUTO, *, only: str = AUTO
) -> list[Prediction]:
    """Return the predictions of all valid layouts, sorted from best to worst.

    `build` returns CONFIG for a strategy name. It raises UserError if CONFIG and the strategy are
    incompatible. Strategies whose algorithm gives different training results are included only if
    `asked` names them. On CPUs, strategies with CPU offload are included only if `asked` names them
    or CONFIG has a DeepSpeed JSON. `only` is the single strategy to rank, or "auto" for all."""
    choices: dict[object, Prediction] = {}
    names = tuple(list_strategies()) if only == AUTO else (only,)
    for name in with_progress(names, "strategies"):
        if name != asked and any(key.work for key in read_keys(strategy_options(name)).values()):
            continue
        with contextlib.suppress(UserError):
            for plan in enumerate_plans(build(name), cluster):
                # Two strategies that give the same layout have the same key.
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
    return sorted(choices.values(), key=lambda choice: choice.sort_key)


def _detours(plan: Draft) -> tuple[int, bool]:
    """Return a sort key for strategies that produce the same layout. The strategy that needs the
    fewest settings comes first. On a tie, fsdp comes before dp for sharded replicas (HSDP)."""
    shards = plan.mesh["dp_shard"] > 1 and (plan.mesh["pp"], plan.mesh["tp"]) == (1, 1)
    return len(settings_of(plan)), shards and plan.strategy.mesh["dp_shard"] == 1


def with_progress(items: Sequence[Any], what: str) -> Iterable[Any]:
    """Return an iterable over `items` that shows a progress bar in a terminal after two seconds."""
    form = "{desc} {bar} {n_fmt}/{total_fmt}"
    return tqdm(items, what, bar_format=form, leave=False, disable=None, delay=2)


def enumerate_plans(config: Request, cluster: Cluster) -> Iterator[Draft]:
    """Yield drafts for all meshes that CONFIG allows. Vary the pipeline schedule and the number of
    micro-batches if CONFIG leaves them open."""
    strategy = load_strategy(config)
    config, model = choose_model(config, cluster.machine, cluster.num_processes, strategy, [])
    candidate = Candidate(config=config, strategy=strategy, model=model, mesh=strategy.mesh)
    cut_is_open = (config.micro_batch_size, config.num_microbatches) == (AUTO, AUTO)
    for mesh in all_meshes(strategy, cluster.num_processes):
        if any(getattr(config, axis) not in (None, -1, size) for axis, size in mesh.items()):
            continue
        schedules: list[str] = [config.pipeline_schedule]
        if mesh["pp"] > 1 and schedules == [AUTO]:
            # Searching for an order takes 1 to 2 s, so a search runs only on request.
            schedules = [name for name in strategy.traits.schedules if not SCHEDULES[name].searched]
        for schedule in schedules:
            with contextlib.suppress(UserError):
                scheduled = config.model_copy(update={"pipeline_schedule": schedule})
                first = lay_out(replace(candidate, config=scheduled, mesh=mesh), cluster)
                yield first
                if first.schedule.searched or not cut_is_open:
                    continue
                # With fewer micro-batches, activations would need more memory than `batch_size`
                # sequences under dp.
                for count in _more_microbatches(first)[:MOST_COUNTS]:
                    with contextlib.suppress(UserError):
                        counted = scheduled.model_copy(update={"num_microbatches": count})
                        yield lay_out(replace(candidate, config=counted, mesh=mesh), cluster)


def _more_microbatches(plan: Draft) -> list[int]:
    """Return the numbers of micro-batches that the plan's schedule accepts and that exceed the
    plan's own number."""
    batch = plan.batch
    sequences = batch.micro_batch_size * batch.num_microbatches
    counts = plan.schedule.counts(plan.mesh["pp"], sequences)
    return [count for count in counts if count > batch.num_microbatches]


def settings_of(plan: Draft) -> dict[str, Any]:
    """Return the settings, other than `strategy`, that produce this layout."""
    named_mesh = plan.strategy.mesh
    mesh = plan.mesh
    settings: dict[str, Any] = {
        axis: size for axis, size in mesh.items() if named_mesh[axis] not in (-1, size)
    }
    # An axis of size -1 gets all remaining processes, which may not be intended. Only one axis may
    # have size -1.
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
    """Return a name such as "3d pp=4 tp=2 1f1b m8". The name contains the strategy, the axes unless
    the strategy implies them, the pipeline schedule and the number of micro-batches."""
    words = [plan.strategy.name]
    if settings_of(plan).keys() & plan.mesh.keys():
        words += [f"{axis}={size}" for axis, size in plan.mesh.items() if size > 1]
    if plan.mesh["pp"] > 1:
        words.append(plan.config.pipeline_schedule)
    if plan.batch.num_microbatches > 1:
        words.append(f"m{plan.batch.num_microbatches}")
    return " ".join(words)


def as_chosen(config: Request, name: str) -> Request:
    """Return CONFIG with the strategy `name` and its defaults. Keys that the user set are kept,
    even if the strategy does not accept them. Raises UserError if the strategy's engine adds
    options, because "auto" never chooses such a strategy."""
    if strategy_options(name).model_fields:
        raise UserError(f"strategy={name!r} is never chosen by auto", fix=f"set strategy to {name}")
    defaults = {"engine_options": {}, **defaults_for(config, name)}
    return with_values(config, strategy=name, **defaults)


def what_fits(plan: Draft, cluster: Cluster) -> list[str]:
    """Suggest settings with which a plan fits into the cluster's memory, such as "set
    num_microbatches=8". Candidates are more micro-batches, recomputation, a quantized base model,
    another strategy and a smaller optimizer state."""
    config = plan.config
    candidate = Candidate(
        config=plan.requested, strategy=plan.strategy, model=plan.model, mesh=plan.mesh
    )

    def fits(**settings: object) -> bool:
        # Request `cuda_graphs` again, because the settings may decide whether graphs are possible.
        decided = config.to_user_words() | {"cuda_graphs": plan.requested.cuda_graphs, **settings}
        request = plan.requested.model_copy(update=decided)
        with contextlib.suppress(UserError):
            draft = lay_out(replace(candidate, config=request), cluster)
            return predict(draft, None).memory_fit == "yes"
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
    """Return the simplest of the fastest layouts that fit into GPU memory. Return None if no layout
    fits. For `build`, see `rank_layouts`."""
    # Host memory is not considered here, because check_memory reports a lack of host memory.
    choices = [
        choice
        for choice in rank_layouts(build, cluster)
        if choice.gpu_memory_fit != "no" and choice.memory.needed_bytes < cluster.below_bytes
    ]
    return first_choice(choices) if choices else None


def first_choice(choices: Sequence[Prediction]) -> Prediction:
    """Return the simplest of the layouts that are as fast as the best layout, within the prediction
    error."""
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
    """Return the layouts that fit as well as `best` and take at most 1 + `share` times as long."""
    room, seconds = best.sort_key
    return [choice for choice in choices if choice.sort_key <= (room, seconds * (1 + share))]


def pick(choices: Sequence[Prediction]) -> list[tuple[str, Prediction]]:
    """Return the recommended layouts from a ranking, each with labels such as "first, fastest"."""
    best = choices[0]
    safest = min(_within(choices, best, SAFE), key=lambda choice: choice.memory.needed_bytes)
    labeled: dict[int, tuple[list[str], Prediction]] = {}
    for label, choice in (("first", first_choice(choices)), ("fastest", best), ("safest", safest)):
        labeled.setdefault(id(choice), ([], choice))[0].append(label)
    return [(", ".join(labels), choice) for labels, choice in labeled.values()]


def choose_strategy(
    config: Request, cluster: Cluster, model: ModelSpec, notes: list[str]
) -> tuple[Request, Strategy]:
    """Choose the strategy and the mesh axes by their predicted speed. Return CONFIG with the
    choice, and the strategy. `model` is the model that CONFIG names. Raises UserError if no
    strategy fits."""
    few = 8 if config.batch_size == AUTO else config.batch_size
    build = functools.partial(as_chosen, config.model_copy(update={"batch_size": few}))
    best = best_layout(build, cluster)
    if best is None:
        # lay_out raises a more specific error. If it succeeds, memory is insufficient.
        plainest = "dp"
        if config.deepspeed_config:
            plainest = "zero2"
        elif config.tp not in (None, 1) or config.pp not in (None, 1):
            plainest = "3d"
        request = build(plainest)
        strategy = load_strategy(request)
        mesh = strategy.mesh
        lay_out(Candidate(config=request, strategy=strategy, model=model, mesh=mesh), cluster)
        what = f"no strategy can train {config.model} on {cluster.name} with batch_size={few}"
        raise UserError(what, fix="set a smaller batch_size, or activation_checkpointing=full")
    settings = settings_of(best.plan)
    chosen = f"the planner chose {best.plan.strategy.name} {show_settings(settings)}".rstrip()
    why = "the first strategy that fits"
    if best.step is not None:
        why = f"predicted {best.step.seconds:.3g} s per step"
    notes.append(f"{chosen} ({why})")
    settings |= {"batch_size": config.batch_size}
    config = best.plan.requested.model_copy(update=settings)
    return config, load_strategy(config)


def choose_batch_size(candidate: Candidate, cluster: Cluster, notes: list[str]) -> Candidate:
    """Return the candidate with a chosen batch size. The batch size is the smallest power of two
    that fits and reaches the fraction NEAR_BEST of the best predicted tokens/s, or 1 if none
    fits."""
    speeds: dict[int, float] = {}
    for size in with_progress([2**power for power in range(MOST_BATCH + 1)], "batch sizes"):
        with contextlib.suppress(UserError):
            draft = lay_out(_sized(candidate, size), cluster)
            prediction = predict(draft, cluster.rates)
            is_below = prediction.memory.needed_bytes < cluster.below_bytes
            if prediction.memory_fit == "yes" and is_below:
                speeds[size] = prediction.tokens_per_s or size
    enough = NEAR_BEST * max(speeds.values(), default=0.0)
    size = next((size for size, speed in speeds.items() if speed >= enough), 1)
    notes.append(f"batch_size is {size}, the smallest value predicted to keep a GPU busy")
    return _sized(candidate, size)


def _sized(candidate: Candidate, batch_size: int) -> Candidate:
    config = candidate.config.model_copy(update={"batch_size": batch_size})
    return replace(candidate, config=config)
