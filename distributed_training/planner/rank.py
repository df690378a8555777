"""Rank the layouts of all strategies for one CONFIG. The simplest of the fastest layouts that fit
comes first. `strategy=auto` uses this layout, and `plan` lists all. This module does not import
torch."""

import bisect
import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

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
from distributed_training.predict.predict import (
    MEMORY_FITS,
    Cluster,
    Prediction,
    has_measured_size,
    predict,
    predict_within,
)
from distributed_training.settings.config import AUTO, Request, with_values
from distributed_training.settings.errors import UserError
from distributed_training.settings.keys import read_keys
from distributed_training.settings.machine import GIB
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
MAX_SLOWDOWN = 0.05  # tolerance for a simpler strategy, if not validated, or a simpler setting
# Values of activation_checkpointing, fastest first
MODES = ("none", "selective", "full", "offload")
NEAR_BEST = 0.95  # fraction of the best tokens/s that a batch size must reach
MAX_BATCH_POWER = 8  # the largest batch size to test is 2 to this power
SIMPLE = ("dp", "fsdp")  # strategies for which a batch size is chosen if any of them fits
LORA_RANK = 16  # rank of the adapters that are suggested if training all weights does not fit
MAX_MICROBATCH_COUNTS = 4  # maximum number of micro-batch counts to test per pipeline schedule


def choose_candidate(request: Request, cluster: Cluster, notes: list[str]) -> Candidate:
    """Return what `request`, which must have a batch size, asks for: a model, a strategy and its
    mesh. With strategy=auto, they are those of the first choice. Raises UserError if the model is
    unknown or no layout is valid."""
    request, model = choose_model(request, cluster.machine, notes)
    if request.strategy != AUTO:
        strategy = load_strategy(request)
        return Candidate(config=request, strategy=strategy, model=model, mesh=strategy.mesh)
    first = rank(request, cluster, num_best=1)[0]
    settings = {"strategy": first.plan.strategy.name, **layout_settings(first.plan)}
    step = "" if first.step is None else f" (predicted {first.step.seconds:.3g} s per step)"
    notes.append(f"the planner chose {format_settings(settings)}{step}")
    return _candidate(first.plan)


def _candidate(plan: Draft) -> Candidate:
    return Candidate(
        config=plan.requested, strategy=plan.strategy, model=plan.model, mesh=plan.mesh
    )


def rank(
    request: Request,
    cluster: Cluster,
    names: Sequence[str] | None = None,
    num_best: int | None = None,
) -> list[Prediction]:
    """Return predictions for all valid layouts: the first choice, then the others from best to
    worst. If the user did not set activation_checkpointing, layouts that would not fit use as much
    of it as necessary. `request` must have a batch size. `names` restricts strategy=auto to these
    strategies. With `num_best`, only the first choice and this many of the best layouts are certain
    to be in the list, which takes less time. Raises UserError if no layout is valid."""
    choices = {}
    predictor = Predictor(cluster, num_best)
    for plan in _useful_plans(request, cluster, names or list_strategies()):
        # Two strategies that give the same layout have the same key.
        strategy = plan.strategy
        engine = strategy.name if strategy.traits.takes_json else strategy.engine
        schedule = plan.config.pipeline_schedule if plan.mesh["pp"] > 1 else None
        key = (
            engine, *plan.mesh.values(), plan.only_copies, schedule, plan.batch.num_microbatches,
        )  # fmt: skip
        if key not in choices:
            if choice := predictor.predict(plan):
                choices[key] = choice
        elif _simplicity_key(plan) < _simplicity_key(choices[key].plan):
            choices[key] = replace(choices[key], plan=plan)
    if not choices:
        raise _explain_no_layout(request, cluster)
    ranked = sorted(choices.values(), key=lambda choice: choice.sort_key)
    may_recompute = cluster.machine.num_gpus > 0 and not request.is_set("activation_checkpointing")
    if may_recompute:
        ranked = [_with_checkpointing(choice, cluster, predictor) for choice in ranked]
        ranked.sort(key=lambda choice: choice.sort_key)
    first = _first_choice(ranked)
    others = [choice for choice in ranked if choice is not first]
    if may_recompute and not request.is_set("checkpointed_blocks"):
        first = _with_some_blocks(first, cluster)
    return [first, *others]


class Predictor:
    """Predict layouts, except those that are neither the first choice nor one of the `num_best`
    best layouts, given the layouts that are known to fit. Without `num_best`, predict all."""

    def __init__(self, cluster: Cluster, num_best: int | None) -> None:
        self.rates = cluster.rates
        self.num_best = num_best
        self.fitting_s: list[float] = []  # sorted times of layouts that fit without offload
        self.simple_s = 0.0  # shortest of these times under dp and fsdp

    def predict(self, plan: Draft) -> Prediction | None:
        """Return the prediction for a layout, or None if its step takes too long."""
        choice = predict_within(plan, self.rates, self._max_s(plan))
        if choice is None or choice.step is None:
            return choice
        if choice.memory_fit == "yes" and not plan.strategy.offloads:
            seconds = choice.step.seconds
            bisect.insort(self.fitting_s, seconds)
            if _is_simple(plan):
                self.simple_s = min(self.simple_s or seconds, seconds)
        return choice

    def _max_s(self, plan: Draft) -> float:
        """Return the limit in seconds for a layout. dp and fsdp have none, because the first choice
        may be much slower than the best layouts."""
        if self.num_best is None or len(self.fitting_s) < self.num_best or _is_simple(plan):
            return math.inf
        near_s = max(self.fitting_s[0], self.simple_s if has_measured_size(plan) else 0)
        return max(self.fitting_s[self.num_best - 1], (1 + TOLERANCE_UNVALIDATED) * near_s)


def _useful_plans(request: Request, cluster: Cluster, names: Iterable[str]) -> Iterator[Draft]:
    """Yield drafts for the layouts of all strategies. With strategy=auto, strategies whose
    algorithm changes the training results are left out. On CPUs, strategies with CPU offload are
    left out, and with one process the other DeepSpeed strategies, unless CONFIG names a DeepSpeed
    configuration."""
    # dp and fsdp come first, because their times limit the others.
    names = sorted(names, key=lambda name: name not in SIMPLE)
    names = names if request.strategy == AUTO else (request.strategy,)
    for name in names:
        if request.strategy == AUTO and any(
            key.work for key in read_keys(strategy_options(name)).values()
        ):
            continue
        with contextlib.suppress(UserError):
            for plan in enumerate_plans(with_values(request, strategy=name), cluster):
                strategy = plan.strategy
                is_requested = name == request.strategy or plan.config.deepspeed_config
                offloads = strategy.steps_on_host and cluster.machine.num_gpus > 0
                is_useful = offloads or (cluster.num_processes > 1 and not strategy.steps_on_host)
                if is_useful or is_requested or not strategy.traits.takes_json:
                    yield plan


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


def _with_checkpointing(choice: Prediction, cluster: Cluster, predictor: Predictor) -> Prediction:
    """Return the layout with the least activation checkpointing with which it fits best."""
    plan = choice.plan
    for mode in MODES[1:]:
        if choice.memory_fit == "yes":
            break
        with contextlib.suppress(UserError):
            request = plan.requested.model_copy(update={"activation_checkpointing": mode})
            draft = lay_out(replace(_candidate(plan), config=request), cluster)
            recomputed = predictor.predict(draft)
            if recomputed is None:
                break
            if MEMORY_FITS.index(recomputed.memory_fit) < MEMORY_FITS.index(choice.memory_fit):
                choice = recomputed
    return choice


def _with_some_blocks(choice: Prediction, cluster: Cluster) -> Prediction:
    """Return the layout with activation checkpointing in as few blocks as necessary, if a step is
    then clearly shorter."""
    plan = choice.plan
    is_none = plan.config.activation_checkpointing == "none"
    if is_none or plan.mesh["pp"] > 1 or choice.step is None:
        return choice

    def predict_with(count: int) -> Prediction:
        request = plan.requested.model_copy(update={"checkpointed_blocks": count})
        return predict(lay_out(replace(_candidate(plan), config=request), cluster), choice.rates)

    counts = range(1, max(plan.layout.blocks_per_stage) + 1)
    index = bisect.bisect_left(
        counts, True, key=lambda count: predict_with(count).memory_fit == choice.memory_fit
    )
    some = predict_with(counts[index])
    assert some.step is not None
    is_faster = some.step.seconds * (1 + MAX_SLOWDOWN) < choice.step.seconds
    return some if is_faster else choice


def _simplicity_key(plan: Draft) -> tuple[int, bool]:
    """Return a sort key for strategies that produce the same layout. Strategies that need fewer
    settings come first. If fsdp and dp need the same number of settings to shard the state, fsdp
    comes first."""
    is_sharded = plan.mesh["dp_shard"] > 1 and (plan.mesh["pp"], plan.mesh["tp"]) == (1, 1)
    return len(layout_settings(plan)), is_sharded and plan.strategy.mesh["dp_shard"] == 1


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
                batch = first_draft.batch
                sequences = batch.micro_batch_size * batch.num_microbatches
                counts = first_draft.schedule.accepted_counts(mesh["pp"], sequences)
                more = [count for count in counts if count > batch.num_microbatches]
                for count in more[:MAX_MICROBATCH_COUNTS]:
                    with contextlib.suppress(UserError):
                        counted = scheduled.model_copy(update={"num_microbatches": count})
                        yield lay_out(replace(candidate, config=counted, mesh=mesh), cluster)


def layout_settings(plan: Draft) -> Settings:
    """Return the settings, other than `strategy`, that produce the plan's layout, including
    activation checkpointing that the planner chose."""
    named_mesh = plan.strategy.mesh
    mesh = plan.mesh
    settings: Settings = {
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
    mode = plan.config.activation_checkpointing
    if mode != "none" and not plan.requested.is_set("activation_checkpointing"):
        settings["activation_checkpointing"] = mode
        count = plan.config.checkpointed_blocks
        if count is not None and not plan.requested.is_set("checkpointed_blocks"):
            settings["checkpointed_blocks"] = count
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


def _first_choice(choices: Sequence[Prediction]) -> Prediction:
    """Return the simplest layout that a practitioner would accept: dp or fsdp, unless another
    layout is faster by more than the typical errors of both predictions. If neither fits, return
    another layout that fits, with offload only if nothing else fits. If nothing fits, return the
    layout without offload that needs the least GPU memory."""
    if not any(choice.fits for choice in choices):
        return min(
            choices, key=lambda choice: (choice.plan.strategy.offloads, choice.memory.needed_bytes)
        )
    best_tier = min(map(_tier, choices))
    first = _simplest([choice for choice in choices if _tier(choice) == best_tier])
    faster = [choice for choice in choices if _is_surely_faster(choice, first)]
    return _simplest(faster) if faster else first


def _tier(choice: Prediction) -> tuple[int, ...]:
    """Return a key that is smaller for layouts that fit better and are simpler to use."""
    memory_fit = MEMORY_FITS.index(choice.memory_fit)
    return memory_fit > 1, choice.plan.strategy.offloads, memory_fit, not _is_simple(choice.plan)


def _is_simple(plan: Draft) -> bool:
    """Return whether a plan has the layout of dp or fsdp."""
    mesh = plan.mesh
    return plan.strategy.traits.averages_with_torch and mesh["pp"] * mesh["cp"] * mesh["tp"] == 1


def _is_surely_faster(choice: Prediction, first: Prediction) -> bool:
    """Return whether a layout fits as well as `first` and is faster by more than the typical errors
    of both predictions. Sizes that were not measured never count as faster."""
    if choice.likely_s is None or first.likely_s is None or not has_measured_size(choice.plan):
        return False
    return choice.memory_fit == first.memory_fit and choice.likely_s[1] < first.likely_s[0]


def _simplest(choices: Sequence[Prediction]) -> Prediction:
    """Return the simplest of the layouts that are as fast as the first, within the prediction
    error. `choices` are sorted."""
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


def as_typed(request: Request, **values: Any) -> Request:
    """Return CONFIG with values that count as set by the user."""
    set_by = request.set_by | dict.fromkeys(values, "command line")
    return request.model_copy(update={**values, "set_by": set_by})


def choose_batch_size(request: Request, cluster: Cluster, notes: list[str]) -> Request:
    """Return CONFIG with a batch size. With batch_size=auto, choose the smallest power of two that
    reaches the fraction NEAR_BEST of the best predicted tokens/s among the sizes whose first choice
    fits into memory. If the GPU's rates are unknown, choose the largest power of two that fits. If
    none fits, choose 1."""
    if request.batch_size != AUTO:
        return request
    speeds = {}
    sizes = [2**power for power in range(MAX_BATCH_POWER + 1)]
    for names in (SIMPLE, None) if request.strategy == AUTO else (None,):
        for size in sizes:
            with contextlib.suppress(UserError):
                sized = as_typed(request, batch_size=size)
                if request.strategy == AUTO:
                    first = rank(sized, cluster, names, num_best=1)[0]
                else:
                    draft = lay_out(choose_candidate(sized, cluster, []), cluster)
                    first = predict(draft, cluster.rates)
                if first.memory_fit == "yes":
                    speeds[size] = first.tokens_per_s or size
        if speeds:
            break
    required_speed = NEAR_BEST * max(speeds.values(), default=0.0)
    size = next((size for size, speed in speeds.items() if speed >= required_speed), 1)
    if not speeds:
        reason = "because no value is predicted to fit into memory"
    elif cluster.rates is None:
        reason = "the largest tested value that is predicted to fit into memory"
    else:
        reason = f"the smallest value predicted to reach {NEAR_BEST:.0%} of the best tokens/s"
    notes.append(f"batch_size is {size}, {reason}")
    return as_typed(request, batch_size=size)


def suggest(plan: Draft, cluster: Cluster) -> list[tuple[Settings, Prediction]]:
    """Return settings with which the run of `plan` would fit, and their predictions: another layout
    for the same training or, if there is none, bf16 weights without an fp32 copy, LoRA, LoRA with a
    4-bit base, then offload. Settings that fit safely come before settings that may fit."""
    request = plan.requested
    changes = OPEN_SETTINGS | {
        "pipeline_schedule": AUTO, "engine_options": {}, "strategy": AUTO,
        "model": plan.config.model,
    }  # fmt: skip
    if request.batch_size != AUTO:
        changes["batch_size"] = plan.config.batch_size
    # The user's number of blocks may be too small to fit, so the planner chooses another.
    set_by = {key: by for key, by in request.set_by.items() if key != "checkpointed_blocks"}
    request = request.model_copy(update={"checkpointed_blocks": None, "set_by": set_by})
    request = as_typed(request, **changes)
    suggestions = []
    alternatives: list[Settings] = [{}]
    if not request.lora_rank and not request.has_bf16_weights:
        alternatives.append({"optimizer": "adamw-bf16-weights"})
    if request.weights != "random":
        adapters = {} if request.lora_rank else {"lora_rank": LORA_RANK}
        nf4 = {"base_dtype": "nf4"} if request.base_dtype in (None, AUTO) else {}
        alternatives += [settings for settings in (adapters, adapters | nf4) if settings]
    for alternative in alternatives:
        settings = dict(alternative)
        with contextlib.suppress(UserError):
            sized = choose_batch_size(as_typed(request, **settings), cluster, [])
            first = rank(sized, cluster, num_best=1)[0]
            if not first.fits:
                continue
            if not settings or plan.requested.strategy != AUTO:
                if first.plan.strategy.name != plan.requested.strategy:
                    settings["strategy"] = first.plan.strategy.name
                settings |= layout_settings(first.plan)
                if plan.requested.is_set("checkpointed_blocks"):
                    settings.setdefault("checkpointed_blocks", None)
            suggestions.append((settings, first))
            if not alternative and not first.plan.strategy.offloads:
                break
    return sorted(suggestions, key=lambda suggestion: _tier(suggestion[1]))


def describe_suggestion(settings: Settings, choice: Prediction) -> str:
    """Return a text such as "lora_rank=16 (18.9 GiB per GPU, 5,120 tokens/s)"."""
    speed = "" if choice.tokens_per_s is None else f", {choice.tokens_per_s:,.0f} tokens/s"
    gib = choice.memory.needed_bytes / GIB
    return f"{format_settings(settings)} ({gib:.1f} GiB per GPU{speed})"


def suggest_settings(plan: Draft, cluster: Cluster) -> str:
    """Describe the settings with which the run of `plan` would fit, best first."""
    texts = [describe_suggestion(*suggestion) for suggestion in suggest(plan, cluster)]
    if texts:
        return f"set {', or '.join(texts)}"
    return "use more GPUs, a smaller model or a smaller batch_size"
