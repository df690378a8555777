"""Every layout of every strategy for one CONFIG, the fastest that fits first. No torch import."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from tqdm import tqdm

from distributed_training.plan.plan import Plan
from distributed_training.plan.schedules import SCHEDULES
from distributed_training.planner.choose import choose_model, lay_out
from distributed_training.planner.layouts import OPEN, Settings, all_meshes, show_settings
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

# Difference in time below which the simpler layout is taken: about what predictions are off by.
ALIKE = 0.03
ALIKE_ON_CPU = 0.2
ALIKE_UNVALIDATED = 0.2  # on several nodes, and for models and GPUs that nobody measured
SAFE = 0.05  # how much longer the layout may take that needs least memory
BUSY = 0.95  # share of the best tokens/s that is enough
MOST_BATCH = 8  # the largest batch that is looked at, a power of two
MOST_COUNTS = 4  # cuts of the batch that are looked at under one pipeline schedule


def rank_layouts(
    build: Callable[[str], Request], cluster: Cluster, asked: str = AUTO, *, only: str = AUTO
) -> list[Prediction]:
    """All layouts that start, the best first; `build` gives CONFIG under a strategy's name and
    raises UserError where it does not go with it. An algorithm that computes something else is
    among them only where it is `asked` for, as on CPUs are strategies that use the host for want of
    GPU memory. `only` names the single strategy to look at."""
    choices: dict[object, Prediction] = {}
    names = tuple(list_strategies()) if only == AUTO else (only,)
    for name in with_progress(names, "strategies"):
        if name != asked and any(key.work for key in read_keys(strategy_options(name)).values()):
            continue
        with contextlib.suppress(UserError):
            for plan in enumerate_plans(build(name), cluster):
                # What is equal for two names of one layout
                strategy = plan.strategy
                if strategy.steps_on_host and name != asked and not cluster.machine.num_gpus:
                    continue
                own = name if strategy.traits.takes_json else strategy.engine
                schedule = plan.config.pipeline_schedule if plan.mesh["pp"] > 1 else None
                key = (own, *plan.mesh.values(), schedule, plan.batch.num_microbatches)
                known = choices.get(key)
                if known is None or _detours(plan) < _detours(known.plan):
                    choices[key] = predict(plan, cluster.rates)
    return sorted(choices.values(), key=lambda choice: choice.order)


def _detours(plan: Plan) -> tuple[int, bool]:
    """Order two names of one layout: the one that needs fewer settings, and fsdp for sharded copies
    (HSDP), comes first."""
    shards = plan.mesh["dp_shard"] > 1 and (plan.mesh["pp"], plan.mesh["tp"]) == (1, 1)
    return len(settings_of(plan)), shards and plan.strategy.mesh["dp_shard"] == 1


def with_progress(items: Sequence[Any], what: str) -> Iterable[Any]:
    """A bar in a terminal where they take longer than two seconds."""
    form = "{desc} {bar} {n_fmt}/{total_fmt}"
    return tqdm(items, what, bar_format=form, leave=False, disable=None, delay=2)


def enumerate_plans(config: Request, cluster: Cluster) -> Iterator[Plan]:
    """Drafts of every mesh, with every schedule and some cuts that CONFIG leaves open."""
    strategy = load_strategy(config)
    config = choose_model(config, cluster.machine, cluster.num_processes, strategy, [])
    cut_is_open = (config.micro_batch_size, config.num_microbatches) == (AUTO, AUTO)
    for mesh in all_meshes(strategy, cluster.num_processes):
        if any(getattr(config, axis) not in (None, -1, size) for axis, size in mesh.items()):
            continue
        schedules: list[str] = [config.pipeline_schedule]
        if mesh["pp"] > 1 and schedules == [AUTO]:
            # Searching for orders takes a second or two for each: only where it is asked for.
            schedules = [name for name in strategy.traits.schedules if not SCHEDULES[name].searched]
        for schedule in schedules:
            own = with_values(config, pipeline_schedule=schedule)
            with contextlib.suppress(UserError):
                first = lay_out(cluster, own, strategy=strategy, mesh=mesh)
                yield first
                if first.schedule.searched or not cut_is_open:
                    continue
                # Fewer would hold more than `batch_size` sequences do under dp.
                for count in _more_microbatches(first)[:MOST_COUNTS]:
                    more = with_values(own, num_microbatches=count)
                    with contextlib.suppress(UserError):
                        yield lay_out(cluster, more, strategy=strategy, mesh=mesh)


def _more_microbatches(plan: Plan) -> list[int]:
    """Larger numbers of micro-batches that the plan's schedule takes."""
    batch = plan.batch
    sequences = batch.micro_batch_size * batch.num_microbatches
    counts = plan.schedule.counts(plan.mesh["pp"], sequences)
    return [count for count in counts if count > batch.num_microbatches]


def settings_of(plan: Plan) -> dict[str, Any]:
    """The keys besides `strategy` that give this layout."""
    asked = plan.strategy.mesh
    mesh = plan.mesh
    settings: dict[str, Any] = {
        axis: size for axis, size in mesh.items() if asked[axis] not in (-1, size)
    }
    # An open axis takes what is left, which may be another than is meant; two cannot.
    open_axes = [axis for axis in mesh if asked[axis] == -1]
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


def layout_name(plan: Plan) -> str:
    """ "3d pp=4 tp=2 1f1b m8": strategy, axes unless the name says all, the cut of the batch."""
    words = [plan.strategy.name]
    if settings_of(plan).keys() & plan.mesh.keys():
        words += [f"{axis}={size}" for axis, size in plan.mesh.items() if size > 1]
    if plan.mesh["pp"] > 1:
        words.append(plan.config.pipeline_schedule)
    if plan.batch.num_microbatches > 1:
        words.append(f"m{plan.batch.num_microbatches}")
    return " ".join(words)


def as_chosen(config: Request, name: str) -> Request:
    """CONFIG under a strategy that "auto" may become: what is set stays, whether or not the
    strategy takes it. Raises UserError for one whose engine has options of its own."""
    if strategy_options(name).model_fields:
        raise UserError(f"strategy={name!r} is never chosen by auto", fix="set strategy to it")
    own = {"engine_options": {}, **defaults_for(config, name)}
    return with_values(config, strategy=name, **own)


def what_fits(plan: Plan, cluster: Cluster) -> list[str]:
    """What to set so that a plan's work fits the cluster that it is for: the same strategy with
    more micro-batches, with recomputation or, which rounds a little more, with less state, then the
    fastest of all."""
    config = plan.config

    def fits(**settings: object) -> bool:
        # Whether a step is one graph may depend on what is tried.
        decided = config.key_values | {"cuda_graphs": plan.requested.cuda_graphs, **settings}
        own = with_values(plan.requested, **decided)
        with contextlib.suppress(UserError):
            draft = lay_out(cluster, own, strategy=plan.strategy, mesh=plan.mesh)
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
    asked = with_values(plan.requested, model=config.model, batch_size=config.batch_size, **opened)
    best = best_layout(functools.partial(as_chosen, asked), cluster)
    if best and best.fits and best.plan.strategy.name != plan.strategy.name:
        suggestions.append({"strategy": best.plan.strategy.name, **settings_of(best.plan)})
    if not suggestions and not config.lora_rank and fits(optimizer="adamw-bf16"):
        suggestions.append({"optimizer": "adamw-bf16"})
    return [f"set {show_settings(settings)}" for settings in suggestions]


def best_layout(
    build: Callable[[str], Request], cluster: Cluster, below_bytes: int | None = None
) -> Prediction | None:
    """The simplest of the fastest layouts that fit, and that need less of a GPU than
    `below_bytes`; None without. `build` as for `rank_layouts`."""
    ranked = rank_layouts(build, cluster)
    # What the host lacks is for the run's own checks to say.
    choices = [
        choice for choice in ranked if choice.room_on_gpu != "no" and _is_below(choice, below_bytes)
    ]
    return first_choice(choices) if choices else None


def first_choice(choices: Sequence[Prediction]) -> Prediction:
    """The simplest of the layouts that are as quick as the best, as far as predictions can tell."""
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
    """The layouts with as much free memory as `best` that take at most `share` longer."""
    room, seconds = best.order
    return [choice for choice in choices if choice.order <= (room, seconds * (1 + share))]


def pick(choices: Sequence[Prediction]) -> list[tuple[str, Prediction]]:
    """The layouts of a ranking to look at first, each once, with what it is."""
    best = choices[0]
    safest = min(_within(choices, best, SAFE), key=lambda choice: choice.memory.needed_bytes)
    found: dict[int, tuple[list[str], Prediction]] = {}
    for what, choice in (("first", first_choice(choices)), ("fastest", best), ("safest", safest)):
        found.setdefault(id(choice), ([], choice))[0].append(what)
    return [(", ".join(names), choice) for names, choice in found.values()]


def _is_below(choice: Prediction, below_bytes: int | None) -> bool:
    return choice.memory.needed_bytes < (below_bytes or sys.maxsize)


def choose_spread(
    config: Request,
    cluster: Cluster,
    strategy: Strategy | None,
    notes: list[str],
    below_bytes: int | None = None,
) -> tuple[Request, Strategy]:
    """Decide "auto" for strategy and batch_size: what is predicted to be fastest here. `strategy`
    is None if it is "auto"."""
    if strategy is None:
        few = 8 if config.batch_size == AUTO else config.batch_size
        build = functools.partial(as_chosen, with_values(config, batch_size=few))
        best = best_layout(build, cluster, below_bytes)
        if best is None:
            # Refused as that strategy is whose refusal says most, or for memory.
            plainest = "dp"
            if config.deepspeed_config:
                plainest = "zero2"
            elif config.tp not in (None, 1) or config.pp not in (None, 1):
                plainest = "3d"
            lay_out(cluster, build(plainest))
            what = f"strategy='auto' finds none that fits {config.model} with batch_size={few}"
            raise UserError(what, fix="set a smaller batch_size, or activation_checkpointing=full")
        settings = settings_of(best.plan)
        said = f"strategy is {best.plan.strategy.name} {show_settings(settings)}".rstrip()
        why = "the first that fits"
        if best.step is not None:
            why = f"predicted {best.step.seconds:.3g} s per step"
        notes.append(f"{said}, the planner's choice: {why}")
        config = with_values(best.plan.requested, batch_size=config.batch_size, **settings)
        strategy = load_strategy(config)
    if config.batch_size == AUTO:
        # The smallest power of two within BUSY of the best predicted tokens/s of those that fit
        speeds: dict[int, float] = {}
        for size in with_progress([2**power for power in range(MOST_BATCH + 1)], "batch sizes"):
            with contextlib.suppress(UserError):
                sized = with_values(config, batch_size=size)
                plan = lay_out(cluster, sized, strategy=strategy)
                prediction = predict(plan, cluster.rates)
                if prediction.room == "yes" and _is_below(prediction, below_bytes):
                    speeds[size] = prediction.tokens_per_s or size
        enough = BUSY * max(speeds.values(), default=0.0)
        size = next((size for size, speed in speeds.items() if speed >= enough), 1)
        notes.append(f"batch_size is {size}: the fewest sequences that keep a GPU busy, predicted")
        config = with_values(config, batch_size=size)
    return config, strategy
