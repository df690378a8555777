"""Sort the layouts of all strategies for one CONFIG by preference. `strategy=auto` uses the first
layout, and `plan` lists all. This module does not import torch."""

import bisect
import contextlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from distributed_training.models import ModelSpec, find_model
from distributed_training.models.table import read_table
from distributed_training.plan.plan import Draft
from distributed_training.planner.choose import choose_model, complete, lay_out, with_checkpointing
from distributed_training.planner.layouts import (
    OPEN_SETTINGS,
    Candidate,
    Settings,
    all_meshes,
    format_settings,
)
from distributed_training.predict.predict import MEMORY_FITS, Cluster, Prediction
from distributed_training.settings.config import AUTO, Request, with_values
from distributed_training.settings.errors import UserError
from distributed_training.settings.machine import GIB
from distributed_training.settings.strategies import list_strategies, load_strategy

MIN_GAIN = 0.05  # fraction by which a setting must shorten a step to be worth typing
COMPLEX_COST = 1.6  # times by which a layout must be faster than a simpler one
# Modes of activation checkpointing, fastest first
MODES = ("selective", "full", "offload")
NEAR_BEST = 0.95  # fraction of the best tokens/s that a batch size must reach
BATCH_SIZES = [2**power for power in range(9)]  # batch sizes to test
SIMPLE = ("dp", "fsdp")  # strategies for which a batch size is chosen if any of them fits
MIN_CONTEXT = 32768  # tokens: an answer to what a GPU can train names no older models
REDUCED = {"batch_size": 1, "max_length": 128}  # settings that are halved, with the lowest values
LORA_RANK = 16  # rank of the adapters that are suggested if training all weights does not fit
MAX_MICROBATCH_COUNTS = 2  # maximum number of micro-batch counts to test per pipeline schedule


def choose_layout(
    request: Request, cluster: Cluster, notes: list[str], names: Iterable[str] | None = None
) -> Draft:
    """Return the draft plan for `request`, which must have a batch size. With strategy=auto, it is
    the first choice among `names`, by default all strategies. Raises UserError if the model is
    unknown or no layout is valid."""
    request, model = choose_model(request, cluster.machine, notes)
    if request.strategy != AUTO:
        return lay_out(_name_candidate(request, model), cluster, notes)
    first = sort_layouts(request, cluster, names)[0]
    settings = {"strategy": first.plan.strategy.name, **layout_settings(first.plan)}
    step = "" if first.step is None else f" (predicted {first.step.seconds:.3g} s per step)"
    notes.append(f"the planner chose {format_settings(settings)}{step}")
    return complete(first.plan, notes)


def _name_candidate(request: Request, model: ModelSpec) -> Candidate:
    """Return the candidate with the strategy that `request` names."""
    strategy = load_strategy(request)
    return Candidate(request=request, strategy=strategy, model=model, mesh=strategy.mesh)


class Fit(NamedTuple):
    """How well a layout fits into memory. Smaller values are preferred, from the first field on."""

    is_unlikely: bool
    offloads: bool  # keeps state in host memory or on disk
    memory_fit: int  # index in MEMORY_FITS


class Preference(NamedTuple):
    """How much a practitioner would like a layout. Smaller values are preferred, from the first
    field on."""

    fit: Fit
    cost: float
    is_complex: bool  # more complex than dp and fsdp
    num_settings: int  # settings to type, besides the strategy


def sort_layouts(
    request: Request, cluster: Cluster, names: Iterable[str] | None = None
) -> list[Prediction]:
    """Return predictions for all valid layouts in the order of `preference`, best first. If the
    user did not set activation_checkpointing, layouts that would not fit use as much of it as
    necessary. `request` must have a batch size, and `names` restricts strategy=auto to these
    strategies. Raises UserError if no layout is valid."""
    layouts = [_with_checkpointing(choice) for choice in predict_all(request, cluster, names)]
    layouts.sort(key=preference)
    layouts[0] = _with_some_blocks(layouts[0])
    return layouts


def fit(choice: Prediction) -> Fit:
    """Return how well a layout fits. Layouts that fit without offload come first, and layouts that
    do not fit last."""
    return Fit(
        is_unlikely=choice.memory_fit in ("unlikely", "no"),
        offloads=choice.fits and choice.plan.strategy.offloads,
        memory_fit=MEMORY_FITS.index(choice.memory_fit),
    )


def preference(choice: Prediction) -> Preference:
    """Return the sort key that puts the layout first that a practitioner would choose.

    Layouts that fit equally well are sorted by their predicted time, and layouts that do not fit by
    the memory that they lack. The time is increased for each setting that a user has to type, and
    unless the layout is as simple as dp and fsdp."""
    plan = choice.plan
    is_split = plan.mesh["pp"] * plan.mesh["cp"] * plan.mesh["tp"] > 1
    is_complex = is_split or not plan.strategy.traits.averages_with_torch
    is_complex |= plan.config.expert_parallel
    num_settings = len(layout_settings(plan))
    cost = 0.0  # If the GPU's rates are unknown, the simplest layout comes first.
    if not choice.fits:
        cost = choice.missing_bytes
    elif choice.estimate is not None:
        cost = choice.estimate.seconds * (1 + MIN_GAIN) ** num_settings
        if is_complex:
            cost *= COMPLEX_COST
    return Preference(fit=fit(choice), cost=cost, is_complex=is_complex, num_settings=num_settings)


def _explain_no_layout(request: Request, cluster: Cluster) -> UserError:
    """Return the error for a CONFIG without a valid layout. If planning a single strategy raises a
    more specific error, raise that error."""
    name = request.strategy
    if name == AUTO:
        candidates = _useful_candidates(request, cluster, list_strategies())
        name = next((each.strategy.name for each in candidates), "dp")
    draft = choose_layout(with_values(request, strategy=name), cluster, [])
    return UserError(
        f"no strategy can train {draft.config.model} with this CONFIG",
        fix="to see the resolved CONFIG, set a strategy and use --dry-run",
    )


def _may_recompute(plan: Draft) -> bool:
    """Return whether the planner chooses the activation checkpointing."""
    return plan.machine.num_gpus > 0 and not plan.requested.is_set("activation_checkpointing")


def _with_checkpointing(choice: Prediction) -> Prediction:
    """Return the layout with the least activation checkpointing with which it fits best or, if it
    does not fit, lacks least."""
    plan = choice.plan
    if not _may_recompute(plan):
        return choice
    for mode in MODES:
        if choice.memory_fit == "yes" or plan.schedule.splits_backward:
            break
        with contextlib.suppress(UserError):
            choice = min(
                choice,
                with_checkpointing(choice, activation_checkpointing=mode),
                key=lambda each: (MEMORY_FITS.index(each.memory_fit), each.missing_bytes),
            )
    return choice


def _with_some_blocks(choice: Prediction) -> Prediction:
    """Return the layout with activation checkpointing in as few blocks as necessary, if a step is
    then clearly shorter."""
    plan = choice.plan
    is_none = plan.config.activation_checkpointing == "none"
    is_given = plan.requested.is_set("checkpointed_blocks") or not _may_recompute(plan)
    if is_none or is_given or plan.mesh["pp"] > 1 or choice.step is None:
        return choice

    def predict_with(count: int) -> Prediction:
        return with_checkpointing(choice, checkpointed_blocks=count)

    counts = range(1, plan.size.num_layers + 1)
    index = bisect.bisect_left(
        counts, True, key=lambda count: predict_with(count).memory_fit == choice.memory_fit
    )
    some = predict_with(counts[index])
    assert some.step is not None
    is_faster = some.step.seconds * (1 + MIN_GAIN) < choice.step.seconds
    return some if is_faster else choice


def predict_all(
    request: Request, cluster: Cluster, names: Iterable[str] | None = None
) -> list[Prediction]:
    """Return predictions for all layouts that CONFIG allows, without activation checkpointing that
    it does not set. If several strategies give the same layout, use the one with which a user types
    the fewest settings. `names` restricts strategy=auto to these strategies. Raises UserError if no
    layout is valid."""
    candidates: dict[tuple[object, ...], Candidate] = {}
    for named in _useful_candidates(request, cluster, names or list_strategies()):
        for candidate in _vary_mesh(named, cluster.num_processes):
            key = _layout_key(candidate)
            candidates[key] = min(candidates.get(key, candidate), candidate, key=_typing_effort)
    layouts: list[Prediction] = []
    for candidate in candidates.values():
        layouts += _vary_microbatches(candidate, cluster)
    if not layouts:
        raise _explain_no_layout(request, cluster)
    return layouts


def _useful_candidates(
    request: Request, cluster: Cluster, names: Iterable[str]
) -> Iterator[Candidate]:
    """Yield a candidate for each strategy. With strategy=auto, strategies whose algorithm changes
    the training results are left out. On CPUs, strategies with CPU offload are left out, and with
    one process the other DeepSpeed strategies, unless CONFIG names a DeepSpeed configuration."""
    request, model = choose_model(request, cluster.machine, [])
    is_auto = request.strategy == AUTO
    for name in names if is_auto else (request.strategy,):
        with contextlib.suppress(UserError):
            candidate = _name_candidate(request.model_copy(update={"strategy": name}), model)
            strategy = candidate.strategy
            if is_auto and strategy.work_options:
                continue
            helps = cluster.num_processes > 1
            if strategy.steps_on_host:
                helps = cluster.machine.num_gpus > 0
            if helps or request.deepspeed_config or not (is_auto and strategy.traits.uses_zero):
                yield candidate


def _vary_mesh(candidate: Candidate, num_processes: int) -> Iterator[Candidate]:
    """Yield a candidate with each mesh that CONFIG allows. Vary the pipeline schedule if CONFIG
    leaves it open."""
    request = candidate.request
    for mesh in all_meshes(candidate.strategy, num_processes):
        if any(getattr(request, axis) not in (None, -1, size) for axis, size in mesh.items()):
            continue
        schedules: tuple[str, ...] = (request.pipeline_schedule,)
        if mesh["pp"] > 1 and request.pipeline_schedule == AUTO:
            schedules = candidate.strategy.traits.schedules
        for schedule in schedules:
            scheduled = request.model_copy(update={"pipeline_schedule": schedule})
            yield replace(candidate, request=scheduled, mesh=mesh)
        may_rest = any(kind.stacks for kind in candidate.model.size.kinds) and mesh["dp_shard"] > 1
        if may_rest and not request.is_set("expert_parallel"):
            resting = request.model_copy(update={"expert_parallel": True})
            yield replace(candidate, request=resting, mesh=mesh)


def _layout_key(candidate: Candidate) -> tuple[object, ...]:
    """Return a key that is equal for two strategies that give the same layout."""
    strategy = candidate.strategy
    engine = strategy.name if strategy.traits.uses_zero else strategy.engine
    schedule = candidate.request.pipeline_schedule if candidate.mesh["pp"] > 1 else None
    rests = candidate.request.expert_parallel
    return engine, candidate.only_copies, rests, schedule, *candidate.mesh.values()


def _typing_effort(candidate: Candidate) -> tuple[int, bool]:
    """Return by what a user prefers one of the strategies that give the same layout: the number of
    settings to type, then whether the layout is clearer as fsdp with dp_replicate."""
    mesh = candidate.mesh
    shards = mesh["dp_shard"] > 1 and mesh["pp"] * mesh["cp"] * mesh["tp"] == 1
    shards_under_dp = shards and candidate.strategy.mesh["dp_shard"] == 1
    return len(_mesh_settings(candidate)), shards_under_dp


def _vary_microbatches(candidate: Candidate, cluster: Cluster) -> Iterator[Prediction]:
    """Yield the prediction for a candidate, if it is valid. If CONFIG leaves the number of
    micro-batches open, also yield predictions with more micro-batches. With fewer, activations
    would need more memory than `batch_size` sequences under dp."""
    try:
        draft = lay_out(candidate, cluster)
    except UserError:
        return
    yield Prediction(draft, cluster.rates)
    config = candidate.request
    is_open = config.micro_batch_size == config.num_microbatches == AUTO
    if not is_open:
        return
    num_microbatches = draft.batch.num_microbatches
    sequences = draft.batch.micro_batch_size * num_microbatches
    counts = draft.schedule.accepted_counts(draft.mesh["pp"], sequences)
    more = [count for count in counts if count > num_microbatches]
    for count in more[:MAX_MICROBATCH_COUNTS]:
        with contextlib.suppress(UserError):
            counted = config.model_copy(update={"num_microbatches": count})
            draft = lay_out(replace(candidate, request=counted), cluster)
            yield Prediction(draft, cluster.rates)


def _mesh_settings(layout: Candidate | Draft) -> Settings:
    """Return the axis sizes that produce a layout's mesh under its strategy."""
    named_mesh = layout.strategy.mesh
    mesh = layout.mesh
    settings: Settings = {
        axis: size for axis, size in mesh.items() if named_mesh[axis] not in (-1, size)
    }
    # An axis of size -1 gets all remaining processes, which may not be intended. Only one axis may
    # have size -1.
    open_axes = [axis for axis in mesh if named_mesh[axis] == -1]
    larger_axes = {axis: size for axis, size in mesh.items() if size > 1}
    if larger_axes and any(mesh[axis] == 1 for axis in open_axes):
        settings |= larger_axes
    if len(open_axes) > 1:
        settings |= {axis: mesh[axis] for axis in open_axes}
    return settings


def layout_settings(plan: Draft) -> Settings:
    """Return the settings, other than `strategy`, that produce the plan's layout, including
    activation checkpointing that the planner chose."""
    settings = _mesh_settings(plan)
    schedule = plan.config.pipeline_schedule
    if plan.mesh["pp"] > 1 and schedule != plan.strategy.traits.schedules[0]:
        settings["pipeline_schedule"] = schedule
    if plan.config.expert_parallel and not plan.requested.is_set("expert_parallel"):
        settings["expert_parallel"] = True
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
    if _mesh_settings(plan):
        words += [f"{axis}={size}" for axis, size in plan.mesh.items() if size > 1]
    if plan.mesh["pp"] > 1:
        words.append(plan.config.pipeline_schedule)
    if plan.config.expert_parallel:
        words.append("ep")
    if plan.batch.num_microbatches > 1:
        words.append(f"m{plan.batch.num_microbatches}")
    return " ".join(words)


def sort_by_speed(choices: Iterable[Prediction]) -> list[Prediction]:
    """Return layouts that fit better first and, of those that fit equally well, the fastest first.
    Layouts that do not fit are sorted by the memory that they lack."""
    return sorted(
        choices,
        key=lambda each: (
            fit(each),
            each.estimate.seconds if each.estimate else each.missing_bytes,
        ),
    )


def as_typed(request: Request, **values: Any) -> Request:
    """Return CONFIG with values that count as typed by the user."""
    set_keys = request.set_keys | values.keys()
    typed = request.typed | {name: str(value) for name, value in values.items()}
    return request.model_copy(update={**values, "set_keys": set_keys, "typed": typed})


def choose_batch_size(request: Request, cluster: Cluster, notes: list[str]) -> Request:
    """Return CONFIG with a batch size. With batch_size=auto, choose the smallest power of two that
    reaches the fraction NEAR_BEST of the best predicted tokens/s among the sizes whose first choice
    fits into memory. With strategy=auto, the first choice is a simple strategy if any fits. If the
    GPU's rates are unknown, choose the largest power of two that fits. If none fits, choose 1."""
    if request.batch_size != AUTO:
        return request
    speeds = _speeds_by_batch_size(request, cluster, SIMPLE)
    if not speeds and request.strategy == AUTO:
        speeds = _speeds_by_batch_size(request, cluster, None)
    size = 1
    reason = "because no value is predicted to fit into memory"
    if speeds:
        required_speed = NEAR_BEST * max(speeds.values())
        size = min(size for size, speed in speeds.items() if speed >= required_speed)
        reason = f"the smallest value predicted to reach {NEAR_BEST:.0%} of the best tokens/s"
        if cluster.rates is None:
            reason = "the largest tested value that is predicted to fit into memory"
    notes.append(f"batch_size is {size}, {reason}")
    return as_typed(request, batch_size=size)


def _speeds_by_batch_size(
    request: Request, cluster: Cluster, names: Iterable[str] | None
) -> dict[int, float]:
    """Return the predicted tokens/s for each batch size whose first choice fits into memory. If the
    GPU's rates are unknown, return the batch size instead of the speed. `names` restricts
    strategy=auto to these strategies."""
    speeds: dict[int, float] = {}
    for size in BATCH_SIZES:
        sized = as_typed(request, batch_size=size)
        with contextlib.suppress(UserError):
            first = Prediction(choose_layout(sized, cluster, [], names), cluster.rates)
            if first.memory_fit != "yes":
                break
            speeds[size] = size / first.estimate.seconds if first.estimate else size
    return speeds


def suggest(
    plan: Draft, cluster: Cluster, strategies: Iterable[str] | None = None
) -> list[tuple[Settings, Prediction]]:
    """Return settings with which the run of `plan` would fit, and their predictions: another layout
    for the same training or, if there is none, bf16 weights without an fp32 copy, LoRA, LoRA with a
    4-bit base, then offload. If none fits: a smaller batch, shorter samples or more GPUs. Settings
    that fit safely come before settings that may fit. Layouts of other strategies than `strategies`
    are not tried."""
    requested = plan.requested
    # The user's activation checkpointing may be too little to fit, so the planner chooses another.
    opened: Settings = {
        "activation_checkpointing": "none",
        "checkpointed_blocks": None,
        "set_keys": requested.set_keys - {"activation_checkpointing", "checkpointed_blocks"},
        "engine_options": {},
    }
    request = requested.model_copy(update=opened)
    changes: Settings = {"strategy": AUTO, "model": plan.config.model}
    if request.batch_size != AUTO:
        changes["batch_size"] = plan.config.batch_size
    request = as_typed(request, **OPEN_SETTINGS, pipeline_schedule=AUTO, **changes)
    suggestions = []
    alternatives = list(_alternatives(request))
    for alternative in alternatives:
        first = _first_fitting(as_typed(request, **alternative), cluster, strategies)
        if first is None:
            continue
        settings = dict(alternative)
        sets_mode = requested.is_set("activation_checkpointing")
        if not alternative or requested.strategy != AUTO or sets_mode:
            if first.plan.strategy.name != requested.strategy:
                settings["strategy"] = first.plan.strategy.name
            settings |= layout_settings(first.plan)
            if requested.is_set("checkpointed_blocks"):
                settings.setdefault("checkpointed_blocks", None)
        suggestions.append((settings, first))
        if not alternative and not first.plan.strategy.offloads:
            break
    if not suggestions:
        for alternative in alternatives[:1] + alternatives[1:][-1:]:
            smaller = _reduce(as_typed(request, **alternative), cluster, strategies)
            suggestions += [(alternative | settings, first) for settings, first in smaller]
    return sorted(suggestions, key=lambda suggestion: fit(suggestion[1]))


def _first_fitting(
    request: Request, cluster: Cluster, strategies: Iterable[str] | None
) -> Prediction | None:
    """Return the first layout for a request, or None if none fits."""
    with contextlib.suppress(UserError):
        sized = choose_batch_size(request, cluster, [])
        first = sort_layouts(sized, cluster, strategies)[0]
        return first if first.fits else None
    return None


def _reduce(
    request: Request, cluster: Cluster, strategies: Iterable[str] | None
) -> Iterator[tuple[Settings, Prediction]]:
    """Yield the batch size, the sample length and the number of GPUs that would fit if only this
    setting were changed. Batch size and length are halved until they fit."""
    for key, least in REDUCED.items():
        value = getattr(request, key)
        while value != AUTO and value // 2 >= least:
            value //= 2
            if first := _first_fitting(as_typed(request, **{key: value}), cluster, strategies):
                yield {key: value}, first
                break
    count = cluster.num_processes
    if count > cluster.processes_per_node or not cluster.machine.num_gpus or strategies:
        return
    for num_gpus in (count + 1, 2 * count, 4 * count, 8 * count):
        machine = replace(
            cluster.machine,
            num_gpus=num_gpus,
            ram_bytes=cluster.machine.ram_bytes * num_gpus // count,
            disk_bytes=cluster.machine.disk_bytes * num_gpus // count,
        )
        larger = replace(
            cluster, num_processes=num_gpus, processes_per_node=num_gpus, machine=machine
        )
        if first := _first_fitting(request, larger, strategies):
            yield {"num_gpus": num_gpus}, first
            return


def _alternatives(request: Request) -> Iterator[Settings]:
    """Yield settings that need less memory, the smallest change of the training first."""
    yield {}
    if not request.lora_rank and not request.has_bf16_weights:
        yield {"optimizer": "adamw-bf16-weights"}
    if request.weights == "random":
        return
    adapters: Settings = {}
    if not request.lora_rank:
        adapters = {"lora_rank": LORA_RANK}
        yield adapters
    if request.base_dtype is None:
        yield adapters | {"base_dtype": "nf4"}


def find_largest(request: Request, cluster: Cluster) -> Iterator[tuple[Settings, list[Prediction]]]:
    """Yield each way to train with, largest first, the three largest models in the table that fit
    without offload. Of models with the same shape, only one is tried, and none whose context is
    shorter than in today's models."""
    models = {id(entry): name for name, entry in read_table().items()}.values()
    sizes = {name: find_model(name).size for name in models}
    by_size = {
        size.num_parameters: name
        for name, size in sizes.items()
        if size.context_length >= MIN_CONTEXT
    }
    request = as_typed(request, strategy=AUTO)
    for alternative in _alternatives(request):
        firsts = (
            _first_fitting(as_typed(request, model=name, **alternative), cluster, SIMPLE)
            for _, name in sorted(by_size.items(), reverse=True)
        )
        fitting = (first for first in firsts if first and first.memory_fit != "unlikely")
        yield alternative, list(itertools.islice(fitting, 3))


def in_gib(num_bytes: float) -> str:
    """Return a number such as "5,010" or "18.9", with three digits."""
    return f"{float(f'{num_bytes / GIB:.3g}'):,.15g}"


def describe_speed(tokens_per_s: float) -> str:
    """Return a text such as "187,000 tokens/s", with three digits."""
    return f"{float(f'{tokens_per_s:.3g}'):,.15g} tokens/s"


def describe_suggestion(settings: Settings, choice: Prediction) -> str:
    """Return a text such as "lora_rank=16 (18.9 GiB per GPU, 5,120 tokens/s)"."""
    speed = "" if choice.tokens_per_s is None else f", {describe_speed(choice.tokens_per_s)}"
    gib = choice.memory.needed_bytes / GIB
    return f"{format_settings(settings)} ({gib:.1f} GiB per GPU{speed})"


def suggest_settings(plan: Draft, cluster: Cluster, strategies: Iterable[str] | None = None) -> str:
    """Describe the settings with which the run of `plan` would fit, best first."""
    suggestions = suggest(plan, cluster, strategies)
    texts = [describe_suggestion(*suggestion) for suggestion in suggestions]
    if texts:
        return f"set {', or '.join(texts)}"
    return "use more GPUs, a smaller model or a smaller batch_size"
