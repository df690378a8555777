"""Decide the sizes of the mesh axes, and partition the model and the batch over the mesh. This
module does not import torch.

    world_size == pp * dp_replicate * dp_shard * cp * tp

The product must equal world_size exactly. Each pipeline stage has consecutive blocks. The first
stage also has the embeddings. The last stage also has the final norm and the output layer. If the
embedding is tied, the output layer uses a copy of the embedding. Under every strategy, a step
processes batch_size x grad_accum_steps x world_size sequences, which are divided into
micro-batches:

    global_batch_size == micro_batch_size * num_microbatches * num_replicas"""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from distributed_training.models import ModelSpec
from distributed_training.plan.layout import Batch, Stages, format_axes
from distributed_training.plan.schedules import Schedule, divisors, find_schedule
from distributed_training.settings.config import AUTO, Request
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import plural
from distributed_training.settings.strategies import MESH_AXES, Strategy

Settings = dict[str, Any]  # CONFIG key -> value that overrides the user's value
OPEN_BATCH: Settings = {"micro_batch_size": AUTO, "num_microbatches": AUTO}
# Values that leave the layout to the planner
OPEN_SETTINGS: Settings = (
    dict.fromkeys((*MESH_AXES, "pipeline_cut", "deepspeed_config")) | OPEN_BATCH
)
LAYOUT_ADVICE = "set strategy to auto, or list the layouts that fit with the command plan"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """CONFIG, a strategy, a model and a mesh, which may still be incompatible."""

    request: Request
    strategy: Strategy
    model: ModelSpec
    mesh: Mapping[str, int]

    @property
    def only_copies(self) -> bool:
        """Return whether each process holds the whole model. Strategies that do not name dp_shard,
        such as dp, replicate the state along cp."""
        num_copies = self.mesh["dp_replicate"]
        if "dp_shard" not in self.strategy.named_axes:
            num_copies *= self.mesh["cp"]
        return num_copies == math.prod(self.mesh.values())

    @property
    def schedule_name(self) -> str:
        """Return CONFIG's pipeline schedule if the engine supports it, otherwise the engine's
        default schedule."""
        name = self.request.pipeline_schedule
        supported = self.strategy.traits.schedules
        return name if name in supported else supported[0]

    @property
    def schedule(self) -> Schedule:
        return find_schedule(self.schedule_name, self.mesh)


def fill_mesh(candidate: Candidate, world_size: int) -> dict[str, int]:
    """Return the mesh after replacing an axis size of -1 with the actual size. Raises UserError if
    the mesh does not fit the number of processes."""
    axes = dict(candidate.mesh)
    open_axes = [axis for axis, size in axes.items() if size == -1]
    fixed_sizes = [size for size in axes.values() if size != -1]
    fixed_size = math.prod(fixed_sizes)
    if len(open_axes) > 1 or min(fixed_sizes) < 1:
        raise UserError(
            f"mesh {format_axes(axes)} is not accepted",
            fix="use whole numbers of 1 or more; at most one axis may be -1",
        )
    if open_axes and world_size % fixed_size == 0:
        axes[open_axes[0]] = world_size // fixed_size
    if math.prod(axes.values()) != world_size:
        number = f"a multiple of {fixed_size}" if open_axes else fixed_size
        raise UserError(
            f"mesh {format_axes(axes)} of strategy {candidate.strategy.name} needs {number} "
            f"processes, but the run has {world_size}",
            fix=LAYOUT_ADVICE,
        )
    return axes


def format_settings(settings: Mapping[str, Any]) -> str:
    """Format settings for messages, for example "tp=1 dp_shard=4"."""
    return " ".join(f"{key}={str(value).lower()}" for key, value in settings.items())


def all_meshes(strategy: Strategy, world_size: int) -> Iterator[dict[str, int]]:
    """Yield all meshes of `world_size` processes over the strategy's axes and the data-parallel
    axes."""
    supported_axes = strategy.traits.axes
    free_axes: set[str] = {axis for axis in ("pp", "cp", "tp") if axis in strategy.named_axes}
    # If a strategy has only one of the axes pp, cp and tp, this axis must be larger than 1.
    # Otherwise the layout would belong to another strategy.
    sole_axes = free_axes if len(free_axes) == 1 and world_size > 1 else ()
    required_axes = [axis for axis in sole_axes if strategy.mesh[axis] != 1]
    free_axes |= {"dp_replicate"}.intersection(supported_axes)
    sizes = (
        divisors(world_size) if axis in free_axes else [1]
        for axis in ("pp", "dp_replicate", "cp", "tp")
    )
    for pp, replicas, cp, tp in itertools.product(*sizes):
        shards, remainder = divmod(world_size, pp * replicas * cp * tp)
        axes = {"pp": pp, "dp_replicate": replicas, "dp_shard": shards, "cp": cp, "tp": tp}
        is_possible = not remainder and (shards == 1 or "dp_shard" in supported_axes)
        if is_possible and all(axes[axis] > 1 for axis in required_axes):
            yield axes


def build_stages(candidate: Candidate) -> Stages:
    """Partition the model into pipeline stages. Raises UserError if the model cannot be divided
    over the mesh, or if a setting in CONFIG is incompatible with the mesh."""
    _check_divisible(candidate)
    config = candidate.request
    size = candidate.model.size
    pp = candidate.mesh["pp"]
    ranks = candidate.schedule.ranks(pp)
    # Multiplications per token in the mean block and in the output layer
    total_cost = 0.0
    for kind in size.kinds:
        matrices = sum(map(math.prod, (*kind.matrices, *kind.expert_products)))
        attention = 2 * kind.attention_width * config.max_length
        total_cost += len(kind.layers) * (matrices + attention)
    block_cost = round(total_cost / size.num_layers)
    head_cost = size.padded_vocab_size * size.hidden_size
    counts = balanced_cut(size.num_layers, block_cost, head_cost, ranks)
    if config.pipeline_cut is not None:
        example = ",".join(map(str, counts))
        words = config.pipeline_cut.split(",")
        are_numbers = all(word.strip().isdecimal() for word in words)
        counts = tuple(map(int, words)) if are_numbers else (0,)
        is_cut = sum(counts) == size.num_layers and min(counts) > 0
        if len(counts) != len(ranks) or not is_cut:
            raise UserError(
                f"pipeline_cut={config.pipeline_cut!r} must be "
                f"{plural(len(ranks), 'positive number')} for all "
                f"{size.num_layers} blocks of {config.model}",
                fix=f"set pipeline_cut to {example}, for example, or to None",
            )
    return Stages(blocks_per_stage=counts, ranks=ranks)


def _check_divisible(candidate: Candidate) -> None:
    """Raise UserError if the model cannot be divided over the mesh."""
    size = candidate.model.size
    label = candidate.model.label
    mesh = candidate.mesh
    pp = mesh["pp"]
    heads = f"num_heads={size.num_heads} of {label}"
    max_length = candidate.request.max_length
    for axis, count, description, why in (
        ("tp", size.num_heads, heads, "attention is split by heads"),
        (
            "tp",
            size.num_kv_heads,
            f"the {size.num_kv_heads} key/value heads of {label}",
            "attention is split by these heads",
        ),
        ("cp", size.num_heads, heads, "attention is split by heads"),
        ("cp", max_length, f"max_length={max_length}", "each rank has the same number of tokens"),
    ):
        if (count or 0) % mesh[axis]:
            raise UserError(
                f"{axis}={mesh[axis]} does not divide {description}", why, LAYOUT_ADVICE
            )
    for kind in size.kinds:
        for name, shape in zip(kind.hf_matrices, kind.matrices, strict=True):
            dim = kind.cut_dim(name)
            if dim is not None and shape[dim] % mesh["tp"]:
                what = f"tp={mesh['tp']} does not divide the {shape[dim]} "
                what += f"{('outputs', 'inputs')[dim]} of {name} in {label}"
                raise UserError(what, fix=LAYOUT_ADVICE)
    for axis in ("pp", "tp"):
        if mesh["cp"] > 1 and mesh[axis] > 1:
            raise UserError(
                f"cp={mesh['cp']} cannot be used with {axis}={mesh[axis]}",
                fix=f"set {axis} to 1, or cp to 1",
            )
    traits = candidate.strategy.traits
    is_pipeline = traits.uses_zero and "pp" in traits.axes
    for axis, why in size.unsplit.items():
        if mesh[axis] > 1 or (axis == "pp" and is_pipeline):
            raise UserError(f"{axis}={mesh[axis]} cannot split {label}", why, LAYOUT_ADVICE)
    stages_per_rank = candidate.schedule.stages_per_rank
    if pp * stages_per_rank > size.num_layers:
        raise UserError(
            f"pp={pp} needs {pp * stages_per_rank} stages, but {label} has "
            f"{size.num_layers} blocks",
            f"the pipeline schedule has {plural(stages_per_rank, 'stage')} per process",
            f"use a model with more blocks (on a CPU, gpt2-tiny-4-blocks), or {LAYOUT_ADVICE}",
        )


@functools.cache
def balanced_cut(
    num_layers: int, block_cost: int, head_cost: int, ranks: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the number of blocks in each stage, chosen to minimize the highest cost of any rank.
    Each stage has at least one block.

    `ranks` is the pipeline rank of each stage. Each rank has one or two stages. `block_cost` and
    `head_cost` are the multiplications per token in a block and in the output layer. The embedding
    lookup costs nothing.

    If a rank with two stages has an odd number of blocks, one stage gets the extra block. V-shaped
    schedules give it to the earlier stage, and other schedules to the later stage. In the simulator
    of pipedream_tutorial, the opposite choice makes steps longer. On the rank with the output
    layer, blocks are instead divided so that both stages cost about the same."""
    pp = max(ranks) + 1
    stages_per_rank = len(ranks) // pp
    last_rank = ranks[-1]
    totals = [stages_per_rank] * pp
    costs = [stages_per_rank * block_cost] * pp
    costs[last_rank] += head_cost
    for _ in range(num_layers - len(ranks)):
        # On a tie, the rank with the output layer gets the block.
        rank = min(range(pp), key=lambda rank: (costs[rank], rank != last_rank))
        totals[rank] += 1
        costs[rank] += block_cost
    if stages_per_rank == 1:
        return tuple(totals)
    v_shaped = ranks[pp] == pp - 1
    first_stages = [-(-total // 2) if v_shaped else total // 2 for total in totals]
    # The stage with the output layer should cost as much as the other stage of the same rank.
    first_stages[last_rank] = totals[last_rank] - max(
        1, (totals[last_rank] * block_cost - head_cost) // (2 * block_cost)
    )
    second_stages = [total - blocks for total, blocks in zip(totals, first_stages, strict=True)]
    return *first_stages, *(second_stages[::-1] if v_shaped else second_stages)


def split_batch(candidate: Candidate) -> Batch:
    """Split the batch of one step into micro-batches as CONFIG requests. For "auto", use the rule
    below.

    The rule chooses the smallest number of micro-batches that the schedule accepts and that meets
    two conditions. Activations need no more memory than the activations of `batch_size` sequences
    under dp. With a pipeline, there are at least `2 * pp` micro-batches. If no number meets both
    conditions, the memory condition takes precedence. Raises UserError if CONFIG requests an
    impossible number."""
    config = candidate.request
    pp = candidate.mesh["pp"]
    num_replicas = candidate.mesh["dp_replicate"] * candidate.mesh["dp_shard"]
    batch_size = int(config.batch_size)
    global_batch_size = batch_size * config.grad_accum_steps * math.prod(candidate.mesh.values())
    sequences = global_batch_size // num_replicas  # exact, because num_replicas divides the batch
    possible_counts = candidate.schedule.accepted_counts(pp, sequences)
    counts = [
        count
        for count in possible_counts
        if config.micro_batch_size in (AUTO, sequences // count)
        and config.num_microbatches in (AUTO, count)
    ]
    if not counts:
        possible = ", ".join(map(str, possible_counts))
        raise UserError(
            f"micro_batch_size={config.micro_batch_size} with num_microbatches="
            f"{config.num_microbatches} does not fit: a replica has {sequences} sequences per step",
            f"with {candidate.schedule_name} over {pp=}, num_microbatches must be one of "
            f"{possible}, and micro_batch_size {sequences} divided by it",
            "set micro_batch_size and num_microbatches to auto",
        )
    tp = candidate.mesh["tp"]

    def fits(count: int) -> bool:
        size = sequences // count
        kept_sequences = size * candidate.schedule.kept_micro_batches(pp, count) / (pp * tp)
        # The loss is computed for one micro-batch at a time, with logits that are sharded over tp.
        return max(kept_sequences, size / tp) <= batch_size

    counts = [count for count in counts if fits(count)] or counts[-1:]
    min_count = 1 if pp == 1 else 2 * pp
    num_microbatches = next((count for count in counts if count >= min_count), counts[-1])
    return Batch(
        global_batch_size=global_batch_size,
        micro_batch_size=sequences // num_microbatches,
        num_microbatches=num_microbatches,
        num_replicas=num_replicas,
    )
