"""Decide the sizes of the mesh axes, and partition the model and the batch over the mesh. This
module does not import torch.

    world_size == pp * dp_replicate * dp_shard * tp

The product must equal world_size exactly. Every layout that an error message suggests has passed
the same checks. Each pipeline stage has consecutive blocks. The first stage also has the
embeddings. The last stage also has the final norm and the output layer, with a copy of the
weights of a tied embedding. Under every strategy, a step has
batch_size x grad_accum_steps x world_size sequences, which are divided into micro-batches:

    global_batch_size == micro_batch_size * num_microbatches * num_replicas"""

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distributed_training.models import ModelSize, ModelSpec
from distributed_training.plan.layout import Batch, Layout, show_axes
from distributed_training.plan.schedules import Schedule, divisors, find_schedule
from distributed_training.settings.config import AUTO, Request, RunConfig
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import plural
from distributed_training.settings.strategies import MESH_AXES, Strategy

Settings = dict[str, Any]  # CONFIG key -> value that overrides the user's value
OPEN_BATCH: Settings = {"micro_batch_size": AUTO, "num_microbatches": AUTO}
# With these values, a layout can be rejected only because of its axes.
RELAXED_SETTINGS: Settings = {
    "sequence_parallel": False,
    "activation_checkpointing": "none",
    "pipeline_cut": None,
    **OPEN_BATCH,
}
# With these settings, fsdp works with any number of processes.
OPEN: Settings = dict.fromkeys((*MESH_AXES, "pipeline_cut", "deepspeed_config")) | OPEN_BATCH


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """CONFIG with a strategy and a mesh that have not yet been checked."""

    config: Request
    strategy: Strategy
    model: ModelSpec
    mesh: Mapping[str, int]

    @property
    def schedule_name(self) -> str:
        """Return CONFIG's pipeline schedule if the engine supports it, otherwise the engine's
        default schedule."""
        name = self.config.pipeline_schedule
        supported = self.strategy.traits.schedules
        return name if name in supported else supported[0]

    @property
    def schedule(self) -> Schedule:
        return find_schedule(self.schedule_name, self.mesh)


def divide(candidate: Candidate, world_size: int) -> tuple[dict[str, int], Layout, Batch]:
    """Return the mesh, the layout of the model and the batch of one step. If the candidate has its
    strategy's mesh, an axis of size -1 gets the remaining processes. Raises UserError if the mesh
    does not fit the processes, or cannot divide the model or the batch."""
    mesh = dict(candidate.mesh)
    if mesh == candidate.strategy.mesh:
        mesh = fill_mesh(candidate, world_size)
        candidate = replace(candidate, mesh=mesh)
    return mesh, build_layout(candidate), cut_batch(candidate)


def fill_mesh(candidate: Candidate, world_size: int) -> dict[str, int]:
    """Return the strategy's mesh after replacing an axis size of -1 with the actual size. Raises
    UserError if the mesh does not fit the number of processes or the model."""
    strategy = candidate.strategy
    axes = dict(strategy.mesh)
    fixed, open_axis = _split_mesh(strategy)
    if any(n < 1 and axis != open_axis for axis, n in axes.items()):
        what = f"mesh {show_axes(axes)} is not accepted"
        fix = "use whole numbers of 1 or more; at most one axis may be -1"
        raise UserError(what, fix=fix)
    if open_axis and world_size % fixed == 0:
        axes[open_axis] = world_size // fixed
    try:
        if math.prod(axes.values()) != world_size:
            number = f"a multiple of {fixed}" if open_axis else fixed
            what = f"mesh {show_axes(axes)} of strategy {strategy.name} needs {number} processes"
            raise UserError(f"{what}, but the run has {world_size}")
        _check_divisible(replace(candidate, mesh=axes))
    except UserError as error:
        alternatives = nearest_layouts(candidate, world_size)[:3]
        fix = "set " + ", or ".join(map(show_settings, alternatives))
        if not alternatives:
            given = show_settings(_changes(candidate.config, OPEN))
            fix = f"use fsdp with {given}" if given else "use fsdp"
        raise UserError(str(error), fix=fix) from None
    return axes


def nearest_layouts(candidate: Candidate, world_size: int) -> list[Settings]:
    """Return alternative settings, each of which gives a valid layout for `world_size` processes
    under the strategy. The alternatives are sorted by the number of settings, then by the distance
    from the strategy's mesh. The distance is the sum of the absolute logarithms of the ratios of
    axis sizes."""
    target = dict(candidate.strategy.mesh)
    fixed, open_axis = _split_mesh(candidate.strategy)
    if open_axis:
        target[open_axis] = max(1, world_size // fixed)
    # A data-parallel axis of size -1 gets the remaining processes without a setting.
    set_axes = ["pp", "tp", *(axis for axis in ("dp_replicate", "dp_shard") if axis != open_axis)]
    ranked = []
    for axes in all_meshes(candidate.strategy, world_size):
        needed = _needed_settings(replace(candidate, mesh=axes))
        if needed is not None:
            settings = {axis: axes[axis] for axis in set_axes if axes[axis] != target[axis]}
            settings |= needed
            distance = sum(abs(math.log(axes[axis] / target[axis])) for axis in set_axes)
            # If two distances are equal, prefer the layout with fewer shards. Distances are
            # rounded, because equal sums may differ in their last digit.
            ranked.append(((len(settings), round(distance, 6), axes["dp_shard"]), settings))
    return [settings for _, settings in sorted(ranked, key=lambda pair: pair[0])]


def show_settings(settings: Mapping[str, Any]) -> str:
    """Format settings for `--set`, for example "tp=1 dp_shard=4"."""
    return " ".join(f"{key}={str(value).lower()}" for key, value in settings.items())


def all_meshes(strategy: Strategy, world_size: int) -> Iterator[dict[str, int]]:
    """Yield all meshes of `world_size` processes over the strategy's axes and the data-parallel
    axes."""
    can = strategy.traits.axes
    free: set[str] = {axis for axis in ("pp", "tp") if axis in strategy.named_axes}
    # If a strategy has only one of the axes pp and tp, this axis must be larger than 1. Otherwise
    # the layout would belong to another strategy.
    alone = free if len(free) == 1 and world_size > 1 else ()
    kept = [axis for axis in alone if strategy.mesh[axis] != 1]
    free |= {"dp_replicate"}.intersection(can)
    sizes = (divisors(world_size) if axis in free else [1] for axis in ("pp", "dp_replicate", "tp"))
    for pp, copies, tp in itertools.product(*sizes):
        shard, odd = divmod(world_size, pp * copies * tp)
        axes = {"pp": pp, "dp_replicate": copies, "dp_shard": shard, "tp": tp}
        possible = not odd and (shard == 1 or "dp_shard" in can)
        if possible and all(axes[axis] > 1 for axis in kept):
            yield axes


def _split_mesh(strategy: Strategy) -> tuple[int, str | None]:
    """Return the product of the known sizes in the strategy's mesh, and the axis of size -1 (None
    if there is none)."""
    open_axis = next((axis for axis, size in strategy.mesh.items() if size == -1), None)
    return math.prod(size for size in strategy.mesh.values() if size != -1), open_axis


def _changes(config: RunConfig, wanted: Settings) -> Settings:
    """Return the settings in `wanted` that differ from CONFIG."""
    return {key: value for key, value in wanted.items() if getattr(config, key) != value}


def _needed_settings(candidate: Candidate) -> Settings | None:
    """Return the settings from RELAXED_SETTINGS that this layout needs. First try no settings, then
    each setting alone, then all settings. Return None if the layout is rejected even with all
    settings."""
    changes = _changes(candidate.config, RELAXED_SETTINGS)
    for settings in ({}, *({key: value} for key, value in changes.items()), changes):
        tried = replace(candidate, config=candidate.config.model_copy(update=settings))
        with contextlib.suppress(UserError):
            build_layout(tried)
            cut_batch(tried)
            return settings
    return None


def build_layout(candidate: Candidate) -> Layout:
    """Partition the model into pipeline stages. Raises UserError if the mesh cannot divide the
    model or is incompatible with a CONFIG setting."""
    _check_divisible(candidate)
    config = candidate.config
    size = candidate.model.size
    pp = candidate.mesh["pp"]
    ranks = candidate.schedule.ranks(pp)
    if pp == 1 and config.pipeline_cut is not None:
        what = "pipeline_cut is set, but there is no pipeline with pp=1"
        raise UserError(what, fix="set pipeline_cut to None")
    name = config.pipeline_schedule
    known = candidate.strategy.traits.schedules
    if pp > 1 and name not in (*known, AUTO):
        what = f"pipeline_schedule={name!r} cannot be set with strategy={candidate.strategy.name!r}"
        fix = f"set pipeline_schedule to {known[0]}, or strategy to pp or 3d"
        raise UserError(what, f"the strategy's engine supports only {', '.join(known)}", fix)
    mode = config.activation_checkpointing
    if candidate.schedule.splits_backward and mode != "none":
        what = f"activation_checkpointing={mode!r} cannot be used with pipeline_schedule={name!r}"
        why = "the schedule keeps the activations for the second half of each backward pass"
        fix = "set activation_checkpointing to none, or pipeline_schedule to 1f1b"
        raise UserError(what, why, fix)
    counts = balanced_cut(size, config.max_length, ranks)
    if config.pipeline_cut is not None:
        example = ",".join(map(str, counts))
        words = config.pipeline_cut.split(",")
        counts = [int(word) if word.strip().isdecimal() else 0 for word in words]
        if len(counts) != len(ranks) or min(counts) == 0 or sum(counts) != size.num_layers:
            what = f"pipeline_cut={config.pipeline_cut!r} must be {len(ranks)} positive numbers "
            what += f"that add up to the {size.num_layers} blocks of {config.model}"
            raise UserError(what, fix=f"set pipeline_cut to {example}, for example, or to None")
    return Layout(blocks_per_stage=tuple(counts), ranks=ranks)


def _check_divisible(candidate: Candidate) -> None:
    """Raise UserError if the mesh cannot divide the model."""
    size = candidate.model.size
    label = candidate.model.label
    pp = candidate.mesh["pp"]
    tp = candidate.mesh["tp"]
    for parts, named, why in (
        (size.num_heads, f"num_heads={size.num_heads} of {label}", "attention is split by heads"),
        (size.num_kv_heads, f"the {size.num_kv_heads} key/value heads of {label}",
         "attention is split by these heads"),
        (size.mlp_units, f"the {size.mlp_units} splittable parts of {label}'s MLP", ""),
    ):  # fmt: skip
        if (parts or tp) % tp:
            raise UserError(f"tp={tp} does not divide {named}", why)
    _check_splits(candidate)
    per_rank = candidate.schedule.stages_per_rank
    if pp * per_rank > size.num_layers:
        what = f"pp={pp} needs {pp * per_rank} stages, but {label} has {size.num_layers} blocks"
        raise UserError(what, f"the pipeline schedule has {plural(per_rank, 'stage')} per process")


def _check_splits(candidate: Candidate) -> None:
    """Raise UserError if the strategy or the mesh splits a model that cannot be split."""
    traits = candidate.strategy.traits
    is_pipeline = traits.takes_json and "pp" in traits.axes
    if candidate.model.size.splits or not (
        is_pipeline or candidate.mesh["pp"] * candidate.mesh["tp"] > 1
    ):
        return
    what = f"strategy={candidate.strategy.name!r} cannot split {candidate.model.label}"
    why = "the model runs transformers' code, but tp and pp need a gpt2, llama, mistral, qwen2 or "
    raise UserError(what, f"{why}qwen3 model")


def balanced_cut(size: ModelSize, seq_len: int, ranks: tuple[int, ...]) -> list[int]:
    """Return the number of blocks in each stage, chosen to minimize the highest cost of any rank.
    Each stage has at least one block.

    `ranks` is the pipeline rank of each stage. Each rank has one or two stages. The cost is the
    number of FLOPs per token, including the output layer but not the embedding lookup. If a rank
    with two stages has an odd number of blocks, its later stage gets the extra block. In a V-shaped
    schedule, its earlier stage gets the extra block. These splits take less time in the simulator
    of pipedream_tutorial."""
    # Multiplications per token in a block and in the output layer
    block = sum(map(math.prod, size.block_matrices)) + 2 * size.attention_width * seq_len
    head = size.padded_vocab_size * size.hidden_size
    pp = max(ranks) + 1
    per_rank = len(ranks) // pp
    last = ranks[-1]
    totals = [per_rank] * pp
    costs = [per_rank * block] * pp
    costs[last] += head
    for _ in range(size.num_layers - len(ranks)):
        # On a tie, the rank with the output layer gets the block.
        rank = min(range(pp), key=lambda rank: (costs[rank], rank != last))
        totals[rank] += 1
        costs[rank] += block
    if per_rank == 1:
        return totals
    v_shaped = ranks[pp] == pp - 1
    first = [-(-total // 2) if v_shaped else total // 2 for total in totals]
    # The stage with the output layer should cost as much as the other stage of the same rank.
    first[last] = totals[last] - max(1, (totals[last] * block - head) // (2 * block))
    second = [total - blocks for total, blocks in zip(totals, first, strict=True)]
    return first + (second[::-1] if v_shaped else second)


def cut_batch(candidate: Candidate) -> Batch:
    """Divide the batch of one step into micro-batches as CONFIG requests or, for "auto", by a rule.

    The rule chooses the smallest number of micro-batches that the schedule accepts and that meets
    two conditions. Activations need no more memory than the activations of `batch_size` sequences
    under dp. With a pipeline, there are at least 2 x pp micro-batches. If no number meets both
    conditions, the memory condition takes precedence. Raises UserError if CONFIG requests an
    impossible number."""
    config = candidate.config
    pp = candidate.mesh["pp"]
    num_replicas = candidate.mesh["dp_replicate"] * candidate.mesh["dp_shard"]
    per_process = int(config.batch_size) * config.grad_accum_steps
    global_batch_size = per_process * math.prod(candidate.mesh.values())
    sequences = global_batch_size // num_replicas  # exact, because num_replicas divides the batch
    possible = candidate.schedule.counts(pp, sequences)
    counts = [
        count
        for count in possible
        if config.micro_batch_size in (AUTO, sequences // count)
        and config.num_microbatches in (AUTO, count)
    ]
    if not counts:
        raise _refusal(candidate, possible, sequences)
    # A block keeps 16 values per hidden unit (predict/costs/block.py). Of these values, 4 are
    # between the layers that tp splits, where only sequence parallelism shards activations.
    tp = candidate.mesh["tp"]
    share = 1 / tp if config.sequence_parallel else (4 + 12 / tp) / 16

    def fits(count: int) -> bool:
        size = sequences // count
        kept = size * candidate.schedule.kept(pp, count) / pp * share
        # The loss is computed for one micro-batch at a time, with logits that are sharded over tp.
        return max(kept, size / tp) <= int(config.batch_size)

    counts = [count for count in counts if fits(count)] or counts[-1:]
    chosen = next((count for count in counts if pp == 1 or count >= 2 * pp), counts[-1])
    return Batch(
        global_batch_size=global_batch_size,
        micro_batch_size=sequences // chosen,
        num_microbatches=chosen,
        num_replicas=num_replicas,
    )


def _refusal(candidate: Candidate, counts: Sequence[int], sequences: int) -> UserError:
    """Return the error for an impossible number or size of micro-batches. The error suggests the
    nearest possible numbers. Micro-batches of one sequence are always possible."""
    config = candidate.config
    pp = candidate.mesh["pp"]
    keys = ("micro_batch_size", "num_microbatches")
    given = {key: getattr(config, key) for key in keys if getattr(config, key) != AUTO}
    wanted = given.get("num_microbatches") or sequences / given["micro_batch_size"]
    nearest = sorted(counts, key=lambda count: abs(math.log(count / wanted)))[:3]
    cuts = [f"micro_batch_size={sequences // n} num_microbatches={n}" for n in sorted(nearest)]
    what = f"{' with '.join(f'{key}={value}' for key, value in given.items())} does not fit: a "
    what += f"replica has {sequences} sequences per step (batch_size {config.batch_size} x "
    what += f"grad_accum_steps {config.grad_accum_steps} x the number of processes per replica)"
    why = f"micro_batch_size x num_microbatches must be {sequences}"
    if pp > 1:
        why += f", and {candidate.schedule_name} over pp={pp} must support num_microbatches"
    cuts.append("set micro_batch_size and num_microbatches to auto")
    return UserError(what, why, f"set {', or '.join(cuts)}")
