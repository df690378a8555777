"""Rank the layouts of all strategies for one CONFIG. The simplest of the fastest layouts that fit
comes first. `strategy=auto` uses this layout, and `plan` lists all. This module does not import
torch."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from tqdm import tqdm

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
from distributed_training.predict.predict import MEMORY_FITS, Cluster, Prediction, predict
from distributed_training.settings.config import AUTO, Request, with_values
from distributed_training.settings.errors import UserError
from distributed_training.settings.keys import read_keys
from distributed_training.settings.strategies import (
    list_strategies,
    load_strategy,
    strategy_options,
)

# Relative difference in step time below which the simpler layout is chosen. The value is about as
# large as the prediction error.
TOLERANCE = 0.03
TOLERANCE_ON_CPU = 0.2
TOLERANCE_UNVALIDATED = 0.2  # on several nodes, and for models and GPUs that were not measured
MAX_SLOWDOWN = 0.05  # tolerance for a simpler strategy, if not validated
MODES = ("none", "selective", "full")  # values of activation_checkpointing, fastest first
FIRST_BATCH_SIZE = 8  # batch size for which the strategy is chosen, if both are open
NEAR_BEST = 0.95  # fraction of the best tokens/s that a batch size must reach
MAX_BATCH_POWER = 8  # the largest batch size to test is 2 to this power
MAX_MICROBATCH_COUNTS = 4  # maximum number of micro-batch counts to test per pipeline schedule


def choose_candidate(request: Request, cluster: Cluster, notes: list[str]) -> Candidate:
    """Return what `request`, which must have a batch size, asks for: a model, a strategy and its
    mesh. With strategy=auto, they are those of the first choice. Raises UserError if the model is
    unknown or no layout is valid."""
    if request.strategy == AUTO:
        first = rank(request, cluster)[0]
        name, settings = first.plan.strategy.name, layout_settings(first.plan)
        text = f"the planner chose {name} {format_settings(settings)}".rstrip()
        step = "" if first.step is None else f" (predicted {first.step.seconds:.3g} s per step)"
        notes.append(text + step)
        request = request.model_copy(update={"strategy": name, **settings})
    strategy = load_strategy(request)
    config, model = choose_model(request, cluster.machine, cluster.num_processes, strategy, notes)
    return Candidate(config=config, strategy=strategy, model=model, mesh=strategy.mesh)


def rank(request: Request, cluster: Cluster) -> list[Prediction]:
    """Return predictions for all valid layouts: the first choice, then the others from best to
    worst. If no layout fits, the first choice is the layout that needs the least memory. If the
    user did not set activation_checkpointing, layouts that would not fit use as much of it as
    necessary. `request` must have a batch size. Raises UserError if no layout is valid."""
    choices = rank_layouts(request, cluster)
    if not choices:
        raise _explain_no_layout(request, cluster)
    if cluster.machine.num_gpus and not request.is_set("activation_checkpointing"):
        choices = [_with_checkpointing(choice, cluster) for choice in choices]
        choices.sort(key=lambda choice: choice.sort_key)
    first = _first_choice(choices)
    if not first.fits:
        first = min(choices, key=lambda choice: choice.memory.needed_bytes)
    return [first, *(choice for choice in choices if choice is not first)]


def rank_layouts(request: Request, cluster: Cluster) -> list[Prediction]:
    """Return predictions for all valid layouts, sorted from best to worst. With strategy=auto,
    strategies whose algorithm changes the training results are left out, and on CPUs also the
    strategies with CPU offload, unless CONFIG names a DeepSpeed configuration."""
    choices: dict[object, Prediction] = {}
    names = tuple(list_strategies()) if request.strategy == AUTO else (request.strategy,)
    for name in with_progress(names, "strategies"):
        if request.strategy == AUTO and any(
            key.work for key in read_keys(strategy_options(name)).values()
        ):
            continue
        with contextlib.suppress(UserError):
            for plan in enumerate_plans(with_values(request, strategy=name), cluster):
                # Two strategies that give the same layout have the same key.
                strategy = plan.strategy
                is_requested = name == request.strategy or plan.config.deepspeed_config
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


def _explain_no_layout(request: Request, cluster: Cluster) -> UserError:
    """Return the error for a CONFIG without a valid layout. If planning a single strategy raises a
    more specific error, raise that error."""
    name = request.strategy
    if name == AUTO:
        is_split = request.tp not in (None, 1) or request.pp not in (None, 1)
        name = "zero2" if request.deepspeed_config else "3d" if is_split else "dp"
    candidate = choose_candidate(with_values(request, strategy=name), cluster, [])
    lay_out(candidate, cluster)
    what = f"no strategy can train {candidate.config.model} with this CONFIG"
    return UserError(what, fix="to see the resolved CONFIG, set a strategy and use --dry-run")


def _with_checkpointing(choice: Prediction, cluster: Cluster) -> Prediction:
    """Return the layout with the least activation checkpointing with which it fits best."""
    plan = choice.plan
    candidate = Candidate(
        config=plan.requested, strategy=plan.strategy, model=plan.model, mesh=plan.mesh
    )
    for mode in MODES[1:]:
        if choice.memory_fit == "yes":
            break
        with contextlib.suppress(UserError):
            request = plan.requested.model_copy(update={"activation_checkpointing": mode})
            recomputed = predict(
                lay_out(replace(candidate, config=request), cluster), cluster.rates
            )
            if MEMORY_FITS.index(recomputed.memory_fit) < MEMORY_FITS.index(choice.memory_fit):
                choice = recomputed
    return choice


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
    candidate = choose_candidate(config, cluster, [])
    config, strategy = candidate.config, candidate.strategy
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
    """Return the settings, other than `strategy`, that produce the plan's layout, including
    activation checkpointing that the planner chose."""
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
    mode = plan.requested.activation_checkpointing
    if mode != "none" and not plan.requested.is_set("activation_checkpointing"):
        settings["activation_checkpointing"] = mode
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


def suggest_settings(plan: Draft, cluster: Cluster) -> str:
    """Suggest the planner's first choice for a plan that does not fit into the cluster's memory."""
    changes: Settings = OPEN_SETTINGS | {"pipeline_schedule": AUTO, "engine_options": {}}
    changes |= {"strategy": AUTO, "model": plan.config.model, "batch_size": plan.config.batch_size}
    with contextlib.suppress(UserError):
        best = rank(plan.requested.model_copy(update=changes), cluster)[0]
        if best.fits:
            settings = {"strategy": best.plan.strategy.name, **layout_settings(best.plan)}
            return f"set {format_settings(settings)}"
    return "use more GPUs, a smaller model, optimizer=adamw-bf16, or LoRA with base_dtype=nf4"


def _first_choice(choices: Sequence[Prediction]) -> Prediction:
    """Return the simplest of the layouts that are as fast as the best layout, within the prediction
    error."""
    best = choices[0]
    tolerance, simple_tolerance = (
        (TOLERANCE, TOLERANCE) if best.validated else (TOLERANCE_UNVALIDATED, MAX_SLOWDOWN)
    )
    if best.plan.machine.num_gpus == 0:
        tolerance = simple_tolerance = TOLERANCE_ON_CPU
    near_best = within(choices, best, tolerance)
    fewest_settings = min(len(layout_settings(choice.plan)) for choice in near_best)
    simplest = [
        choice for choice in near_best if len(layout_settings(choice.plan)) == fewest_settings
    ]
    names = list(list_strategies())
    return min(
        within(simplest, simplest[0], simple_tolerance),
        key=lambda choice: names.index(choice.plan.strategy.name),
    )


def within(choices: Sequence[Prediction], best: Prediction, tolerance: float) -> list[Prediction]:
    """Return the layouts that are as likely to fit into memory as `best` and slower by at most the
    fraction `tolerance`."""
    memory_fit, seconds = best.sort_key
    return [
        choice for choice in choices if choice.sort_key <= (memory_fit, seconds * (1 + tolerance))
    ]


def choose_batch_size(request: Request, cluster: Cluster, notes: list[str]) -> Request:
    """Return CONFIG with a batch size. Choose the smallest power of two that fits into memory and
    reaches the fraction NEAR_BEST of the best predicted tokens/s. If the GPU's rates are unknown,
    choose the largest power of two that fits. If none fits, choose 1. With strategy=auto, use the
    first choice for FIRST_BATCH_SIZE."""
    config = request.model_copy(update={"batch_size": FIRST_BATCH_SIZE})
    candidate = choose_candidate(config, cluster, [])
    speeds: dict[int, float] = {}
    for size in with_progress([2**power for power in range(MAX_BATCH_POWER + 1)], "batch sizes"):
        with contextlib.suppress(UserError):
            sized = candidate.config.model_copy(update={"batch_size": size})
            prediction = predict(lay_out(replace(candidate, config=sized), cluster), cluster.rates)
            if prediction.memory_fit == "yes":
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
    return request.model_copy(update={"batch_size": size})
