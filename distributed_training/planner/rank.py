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
    OPEN_SETTINGS,
    Candidate,
    Settings,
    all_meshes,
    format_settings,
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
TOLERANCE = 0.03
TOLERANCE_ON_CPU = 0.2
TOLERANCE_UNVALIDATED = 0.2  # on several nodes, and for models and GPUs that were not measured
MAX_SLOWDOWN = 0.05  # maximum relative increase in step time for the layout with the least memory
NEAR_BEST = 0.95  # fraction of the best tokens/s that a batch size must reach
MAX_BATCH_POWER = 8  # the largest batch size to test is 2 to this power
MAX_MICROBATCH_COUNTS = 4  # maximum number of micro-batch counts to test per pipeline schedule


def rank_layouts(
    build: Callable[[str], Request], cluster: Cluster, requested: str = AUTO, *, only: str = AUTO
) -> list[Prediction]:
    """Return predictions for all valid layouts, sorted from best to worst.

    `build` returns CONFIG for a strategy name. It raises UserError if CONFIG and the strategy are
    incompatible. Strategies whose algorithm changes the training results are included only if
    `requested` names them. On CPUs, strategies with CPU offload are included only if `requested`
    names them or CONFIG names a DeepSpeed configuration. `only` is the single strategy to rank, or
    "auto" for all."""
    choices: dict[object, Prediction] = {}
    names = tuple(list_strategies()) if only == AUTO else (only,)
    for name in with_progress(names, "strategies"):
        if name != requested and any(
            key.work for key in read_keys(strategy_options(name)).values()
        ):
            continue
        with contextlib.suppress(UserError):
            for plan in enumerate_plans(build(name), cluster):
                # Two strategies that give the same layout have the same key.
                strategy = plan.strategy
                is_requested = name == requested or plan.config.deepspeed_config
                if strategy.steps_on_host and not is_requested and not cluster.machine.num_gpus:
                    continue
                engine = name if strategy.traits.takes_json else strategy.engine
                schedule = plan.config.pipeline_schedule if plan.mesh["pp"] > 1 else None
                key = (engine, *plan.mesh.values(), schedule, plan.batch.num_microbatches)
                previous_choice = choices.get(key)
                if previous_choice is None or _simplicity_key(plan) < _simplicity_key(
                    previous_choice.plan
                ):
                    choices[key] = predict(plan, cluster.rates)
    return sorted(choices.values(), key=lambda choice: choice.sort_key)


def _simplicity_key(plan: Draft) -> tuple[int, bool]:
    """Return a sort key for strategies that produce the same layout. Strategies that need fewer
    settings come first. If fsdp and dp need the same number of settings to shard the state, fsdp
    comes first."""
    is_sharded = plan.mesh["dp_shard"] > 1 and (plan.mesh["pp"], plan.mesh["tp"]) == (1, 1)
    return len(layout_settings(plan)), is_sharded and plan.strategy.mesh["dp_shard"] == 1


def with_progress(items: Sequence[Any], what: str) -> Iterable[Any]:
    """Return an iterable over `items` that shows a progress bar in a terminal after two seconds."""
    bar_format = "{desc} {bar} {n_fmt}/{total_fmt}"
    return tqdm(items, what, bar_format=bar_format, leave=False, disable=None, delay=2)


def enumerate_plans(config: Request, cluster: Cluster) -> Iterator[Draft]:
    """Yield drafts for all meshes that CONFIG allows. Vary the pipeline schedule and the number of
    micro-batches if CONFIG leaves them open."""
    strategy = load_strategy(config)
    config, model = choose_model(config, cluster.machine, cluster.num_processes, strategy, [])
    candidate = Candidate(config=config, strategy=strategy, model=model, mesh=strategy.mesh)
    microbatches_are_auto = (config.micro_batch_size, config.num_microbatches) == (AUTO, AUTO)
    for mesh in all_meshes(strategy, cluster.num_processes):
        if any(getattr(config, axis) not in (None, -1, size) for axis, size in mesh.items()):
            continue
        schedules: list[str] = [config.pipeline_schedule]
        if mesh["pp"] > 1 and schedules == [AUTO]:
            # Searching for an order takes 1 to 2 s, so a search runs only on request.
            schedules = [
                name for name in strategy.traits.schedules if not SCHEDULES[name].is_searched
            ]
        for schedule in schedules:
            with contextlib.suppress(UserError):
                scheduled = config.model_copy(update={"pipeline_schedule": schedule})
                first_draft = lay_out(replace(candidate, config=scheduled, mesh=mesh), cluster)
                yield first_draft
                if first_draft.schedule.is_searched or not microbatches_are_auto:
                    continue
                # With fewer micro-batches, activations would need more memory than `batch_size`
                # sequences under dp.
                for count in _more_microbatches(first_draft)[:MAX_MICROBATCH_COUNTS]:
                    with contextlib.suppress(UserError):
                        counted = scheduled.model_copy(update={"num_microbatches": count})
                        yield lay_out(replace(candidate, config=counted, mesh=mesh), cluster)


def _more_microbatches(plan: Draft) -> list[int]:
    """Return the numbers of micro-batches that the plan's schedule accepts and that exceed the
    plan's own number."""
    batch = plan.batch
    sequences = batch.micro_batch_size * batch.num_microbatches
    counts = plan.schedule.accepted_counts(plan.mesh["pp"], sequences)
    return [count for count in counts if count > batch.num_microbatches]


def layout_settings(plan: Draft) -> dict[str, Any]:
    """Return the settings, other than `strategy`, that produce the plan's layout."""
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
    if layout_settings(plan).keys() & plan.mesh.keys():
        words += [f"{axis}={size}" for axis, size in plan.mesh.items() if size > 1]
    if plan.mesh["pp"] > 1:
        words.append(plan.config.pipeline_schedule)
    if plan.batch.num_microbatches > 1:
        words.append(f"m{plan.batch.num_microbatches}")
    return " ".join(words)


def with_strategy(config: Request, name: str) -> Request:
    """Return CONFIG with the strategy `name` and its defaults. Keys that the user set are kept,
    even if the strategy does not accept them. Raises UserError if the strategy's engine adds
    options, because "auto" never chooses such a strategy."""
    if strategy_options(name).model_fields:
        raise UserError(f"strategy={name!r} is never chosen by auto", fix=f"set strategy to {name}")
    defaults = {"engine_options": {}, **defaults_for(config, name)}
    return with_values(config, strategy=name, **defaults)


def suggest_settings(plan: Draft, cluster: Cluster) -> list[str]:
    """Suggest settings with which a plan fits into the cluster's memory, such as "set
    num_microbatches=8". Candidates are more micro-batches, recomputation, a quantized base model,
    another strategy and a smaller optimizer state."""
    config = plan.config
    candidate = Candidate(
        config=plan.requested, strategy=plan.strategy, model=plan.model, mesh=plan.mesh
    )

    def fits(**settings: object) -> bool:
        # Request `cuda_graphs` again, because the settings may decide whether graphs are possible.
        decided = config.to_key_values() | {"cuda_graphs": plan.requested.cuda_graphs, **settings}
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
    open_settings = OPEN_SETTINGS | {"pipeline_schedule": AUTO}
    decided = {"model": config.model, "batch_size": config.batch_size}
    request = plan.requested.model_copy(update=decided | open_settings)
    best = best_layout(functools.partial(with_strategy, request), cluster)
    if best and best.fits and best.plan.strategy.name != plan.strategy.name:
        suggestions.append({"strategy": best.plan.strategy.name, **layout_settings(best.plan)})
    if not suggestions and not config.lora_rank and fits(optimizer="adamw-bf16"):
        suggestions.append({"optimizer": "adamw-bf16"})
    return [f"set {format_settings(settings)}" for settings in suggestions]


def best_layout(build: Callable[[str], Request], cluster: Cluster) -> Prediction | None:
    """Return the simplest of the fastest layouts that fit into GPU memory. Return None if no layout
    fits. For `build`, see `rank_layouts`."""
    # Host memory is not considered here, because check_memory reports a lack of host memory.
    choices = [
        choice
        for choice in rank_layouts(build, cluster)
        if choice.gpu_memory_fit != "no" and choice.memory.needed_bytes < cluster.max_gpu_bytes
    ]
    return first_choice(choices) if choices else None


def first_choice(choices: Sequence[Prediction]) -> Prediction:
    """Return the simplest of the layouts that are as fast as the best layout, within the prediction
    error."""
    best = choices[0]
    tolerance, simple_tolerance = (
        (TOLERANCE, TOLERANCE) if best.validated else (TOLERANCE_UNVALIDATED, MAX_SLOWDOWN)
    )
    if best.plan.machine.num_gpus == 0:
        tolerance = simple_tolerance = TOLERANCE_ON_CPU
    near_best = _within(choices, best, tolerance)
    fewest_settings = min(len(layout_settings(choice.plan)) for choice in near_best)
    simplest = [
        choice for choice in near_best if len(layout_settings(choice.plan)) == fewest_settings
    ]
    names = list(list_strategies())
    return min(
        _within(simplest, simplest[0], simple_tolerance),
        key=lambda choice: names.index(choice.plan.strategy.name),
    )


def _within(choices: Sequence[Prediction], best: Prediction, tolerance: float) -> list[Prediction]:
    """Return the layouts that are as likely to fit into memory as `best` and slower by at most the
    fraction `tolerance`."""
    memory_fit, seconds = best.sort_key
    return [
        choice for choice in choices if choice.sort_key <= (memory_fit, seconds * (1 + tolerance))
    ]


def recommended_layouts(choices: Sequence[Prediction]) -> list[tuple[str, Prediction]]:
    """Return the recommended layouts from a ranking, each with labels such as "first, fastest"."""
    best = choices[0]
    safest = min(
        _within(choices, best, MAX_SLOWDOWN), key=lambda choice: choice.memory.needed_bytes
    )
    labeled: dict[int, tuple[list[str], Prediction]] = {}
    for label, choice in (("first", first_choice(choices)), ("fastest", best), ("safest", safest)):
        labeled.setdefault(id(choice), ([], choice))[0].append(label)
    return [(", ".join(labels), choice) for labels, choice in labeled.values()]


def choose_strategy(
    config: Request, cluster: Cluster, model: ModelSpec, notes: list[str]
) -> tuple[Request, Strategy]:
    """Choose the strategy and the mesh axes by predicted speed. Return CONFIG with the chosen
    settings, and the chosen strategy. `model` is the model that CONFIG names. Raises UserError if
    no strategy fits."""
    batch_size = 8 if config.batch_size == AUTO else config.batch_size
    build = functools.partial(with_strategy, config.model_copy(update={"batch_size": batch_size}))
    best = best_layout(build, cluster)
    if best is None:
        # lay_out raises a more specific error. If it succeeds, memory is insufficient.
        fallback_name = "dp"
        if config.deepspeed_config:
            fallback_name = "zero2"
        elif config.tp not in (None, 1) or config.pp not in (None, 1):
            fallback_name = "3d"
        request = build(fallback_name)
        strategy = load_strategy(request)
        mesh = strategy.mesh
        lay_out(Candidate(config=request, strategy=strategy, model=model, mesh=mesh), cluster)
        what = (
            f"no strategy can train {config.model} on {cluster.name} with batch_size={batch_size}"
        )
        raise UserError(what, fix="set a smaller batch_size, or activation_checkpointing=full")
    settings = layout_settings(best.plan)
    choice_text = (
        f"the planner chose {best.plan.strategy.name} {format_settings(settings)}".rstrip()
    )
    why = "the first strategy that fits"
    if best.step is not None:
        why = f"predicted {best.step.seconds:.3g} s per step"
    notes.append(f"{choice_text} ({why})")
    settings |= {"batch_size": config.batch_size}
    config = best.plan.requested.model_copy(update=settings)
    return config, load_strategy(config)


def choose_batch_size(candidate: Candidate, cluster: Cluster, notes: list[str]) -> Candidate:
    """Return the candidate with a batch size. Choose the smallest power of two that fits into
    memory and reaches the fraction NEAR_BEST of the best predicted tokens/s. If the GPU's rates are
    unknown, choose the largest power of two that fits. If none fits, choose 1."""
    speeds: dict[int, float] = {}
    for size in with_progress([2**power for power in range(MAX_BATCH_POWER + 1)], "batch sizes"):
        with contextlib.suppress(UserError):
            draft = lay_out(_with_batch_size(candidate, size), cluster)
            prediction = predict(draft, cluster.rates)
            is_below = prediction.memory.needed_bytes < cluster.max_gpu_bytes
            if prediction.memory_fit == "yes" and is_below:
                speeds[size] = prediction.tokens_per_s or size
    required_speed = NEAR_BEST * max(speeds.values(), default=0.0)
    size = next((size for size, speed in speeds.items() if speed >= required_speed), 1)
    if not speeds:
        reason = "because no value is predicted to fit into memory"
    elif cluster.rates is None:
        reason = "the largest tested value that is predicted to fit into memory"
    else:
        reason = f"the smallest value predicted to reach {NEAR_BEST:.0%} of the best tokens/s"
    notes.append(f"batch_size is {size}, {reason}")
    return _with_batch_size(candidate, size)


def _with_batch_size(candidate: Candidate, batch_size: int) -> Candidate:
    config = candidate.config.model_copy(update={"batch_size": batch_size})
    return replace(candidate, config=config)
