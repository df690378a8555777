"""The sizes of the mesh's axes, and how model and batch are laid over it. No torch import.

    world_size == pp * dp_replicate * dp_shard * tp

That is never rounded; what a refusal suggests has been tried on the rules that refuse. A stage is a
run of consecutive blocks; the first also holds the embeddings, the last the final norm and the
output layer, which has the tied embedding's weights once more. A step has batch_size x
grad_accum_steps x processes sequences under every strategy, in micro-batches:

    global_batch_size == micro_batch_size * num_microbatches * num_replicas"""

import contextlib
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distributed_training.models import ModelSize, ModelSpec
from distributed_training.plan.layout import Batch, Layout, show_axes
from distributed_training.plan.schedules import Schedule, divisors, find_schedule
from distributed_training.settings.config import AUTO, RunConfig
from distributed_training.settings.errors import UserError
from distributed_training.settings.strategies import MESH_AXES, Strategy

Settings = dict[str, Any]  # CONFIG key -> value, to be put over what was asked
OPEN_BATCH: Settings = {"micro_batch_size": AUTO, "num_microbatches": AUTO}
# With these values a layout is refused for its axes alone.
HARMLESS: Settings = {
    "sequence_parallel": False,
    "activation_checkpointing": "none",
    "pipeline_cut": None,
    **OPEN_BATCH,
}
# With these fsdp takes any number of processes.
OPEN: Settings = dict.fromkeys((*MESH_AXES, "pipeline_cut", "deepspeed_config")) | OPEN_BATCH


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """CONFIG under a strategy over one mesh, which is to be laid out or refused."""

    config: RunConfig
    strategy: Strategy
    model: ModelSpec
    mesh: Mapping[str, int]

    @property
    def schedule(self) -> Schedule:
        return find_schedule(self.strategy.schedule(self.config), self.mesh)


def fill_mesh(candidate: Candidate, world_size: int) -> dict[str, int]:
    """The strategy's mesh with the axis that is -1 filled in; UserError where that cannot be."""
    strategy = candidate.strategy
    axes = dict(strategy.mesh)
    fixed, open_axis = _split_mesh(strategy)
    if any(n < 1 and axis != open_axis for axis, n in axes.items()):
        what = f"mesh {show_axes(axes)} is not accepted; at most one axis may be -1"
        raise UserError(what, fix="give the others whole numbers of 1 or more")
    if open_axis and world_size % fixed == 0:
        axes[open_axis] = world_size // fixed
    try:
        if math.prod(axes.values()) != world_size:
            what = f"mesh {show_axes(axes)} does not make {world_size} processes"
            number = f"a multiple of {fixed}" if open_axis else fixed
            raise UserError(what, f"that of {os.path.relpath(strategy.source)} needs {number}")
        _check_divisible(replace(candidate, mesh=axes))
    except UserError as error:
        found = nearest_layouts(candidate, world_size)[:3]
        fix = "set " + "; or ".join(map(show_settings, found))
        if not found:
            given = show_settings(_changes(candidate.config, OPEN))
            fix = f"take fsdp with {given}" if given else "take fsdp"
        raise UserError(str(error), fix=fix) from None
    return axes


def nearest_layouts(candidate: Candidate, world_size: int) -> list[Settings]:
    """Settings each of which makes a layout of `world_size` processes under the strategy, those
    nearest to its mesh first: fewest settings, then the sum of the ratios' logarithms."""
    asked = dict(candidate.strategy.mesh)
    fixed, open_axis = _split_mesh(candidate.strategy)
    if open_axis:
        asked[open_axis] = max(1, world_size // fixed)
    # An open data-parallel axis takes what is left without being told.
    told = ["pp", "tp", *(axis for axis in ("dp_replicate", "dp_shard") if axis != open_axis)]
    found = []
    for axes in all_meshes(candidate.strategy, world_size):
        needed = _needed_settings(replace(candidate, mesh=axes))
        if needed is not None:
            settings = {axis: axes[axis] for axis in told if axes[axis] != asked[axis]} | needed
            distance = sum(abs(math.log(axes[axis] / asked[axis])) for axis in told)
            # Of two as near, the one with whole copies: rounded, so that equal sums are equal.
            found.append(((len(settings), round(distance, 6), axes["dp_shard"]), settings))
    return [settings for _, settings in sorted(found, key=lambda pair: pair[0])]


def show_settings(settings: Mapping[str, Any]) -> str:
    """ "tp=1 dp_shard=4", as `--set` reads them."""
    return " ".join(f"{key}={str(value).lower()}" for key, value in settings.items())


def all_meshes(strategy: Strategy, world_size: int) -> Iterator[dict[str, int]]:
    """All meshes of so many processes: of the strategy's own axes and data-parallel ones."""
    can = strategy.traits.axes
    free: set[str] = {axis for axis in ("pp", "tp") if axis in strategy.named_axes}
    # Without its only such axis a strategy would be another one.
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
    """The product of the sizes that the mesh gives, and the axis that it leaves open."""
    open_axis = next((axis for axis, size in strategy.mesh.items() if size == -1), None)
    return math.prod(size for size in strategy.mesh.values() if size != -1), open_axis


def _changes(config: RunConfig, wanted: Settings) -> Settings:
    """Those of `wanted` that CONFIG has otherwise."""
    return {key: value for key, value in wanted.items() if getattr(config, key) != value}


def _needed_settings(candidate: Candidate) -> Settings | None:
    """What of HARMLESS this layout needs: nothing, one of them or all; None where nothing helps."""
    changes = _changes(candidate.config, HARMLESS)
    for settings in ({}, *({key: value} for key, value in changes.items()), changes):
        tried = replace(candidate, config=candidate.config.model_copy(update=settings))
        with contextlib.suppress(UserError):
            build_layout(tried)
            cut_batch(tried)
            return settings
    return None


def build_layout(candidate: Candidate) -> Layout:
    """Cut the model for a mesh; UserError where that, or a setting of CONFIG, cannot be."""
    _check_divisible(candidate)
    config = candidate.config
    size = candidate.model.size
    pp = candidate.mesh["pp"]
    ranks = candidate.schedule.ranks(pp)
    if pp == 1 and config.pipeline_cut is not None:
        raise UserError("pipeline_cut is set but there is no pipeline", fix="set it to None")
    name = config.pipeline_schedule
    known = candidate.strategy.traits.schedules
    if pp > 1 and name not in (*known, AUTO):
        what = f"pipeline_schedule={name!r} cannot be set with strategy={candidate.strategy.name!r}"
        fix = f"set it to {known[0]}, or strategy to pp or 3d"
        raise UserError(what, f"its engine has {', '.join(known)}", fix)
    mode = config.activation_checkpointing
    if candidate.schedule.splits_backward and mode != "none":
        what = f"activation_checkpointing={mode!r} does not go with pipeline_schedule={name!r}"
        why = "the schedule keeps what would be recomputed for the second half of backward passes"
        raise UserError(what, why, "set it to none, or pipeline_schedule to 1f1b")
    counts = balanced_cut(size, config.max_length, ranks)
    if config.pipeline_cut is not None:
        example = ",".join(map(str, counts))
        words = config.pipeline_cut.split(",")
        counts = [int(word) if word.strip().isdecimal() else 0 for word in words]
        if len(counts) != len(ranks) or min(counts) == 0 or sum(counts) != size.num_layers:
            what = f"pipeline_cut={config.pipeline_cut!r} is not {len(ranks)} numbers that add up "
            what += f"to the {size.num_layers} blocks of {config.model}"
            raise UserError(what, fix=f"write {example}, for example, or None")
    return Layout(blocks_per_stage=tuple(counts), ranks=ranks)


def _check_divisible(candidate: Candidate) -> None:
    """Raises UserError where the model cannot be divided over the mesh."""
    size = candidate.model.size
    label = candidate.model.label
    pp = candidate.mesh["pp"]
    tp = candidate.mesh["tp"]
    for parts, named, why in (
        (size.num_heads, f"num_heads={size.num_heads} of {label}", "attention is split by heads"),
        (size.num_kv_heads, f"the {size.num_kv_heads} heads of k and v of {label}",
         "attention is split by them"),
        (size.mlp_units, f"the {size.mlp_units} parts of {label}'s MLP", ""),
    ):  # fmt: skip
        if (parts or tp) % tp:
            raise UserError(f"tp={tp} does not divide {named}", why)
    _check_splits(candidate)
    each = candidate.schedule.stages_per_rank
    if pp * each > size.num_layers:
        what = f"pp={pp} needs {pp * each} stages but {label} has {size.num_layers} blocks"
        raise UserError(what, f"its pipeline schedule has {each} a process")


def _check_splits(candidate: Candidate) -> None:
    """Raise UserError if the strategy, or its mesh, divides a model that cannot be divided."""
    traits = candidate.strategy.traits
    is_pipeline = traits.takes_json and "pp" in traits.axes
    if candidate.model.size.splits or not (
        is_pipeline or candidate.mesh["pp"] * candidate.mesh["tp"] > 1
    ):
        return
    what = f"strategy={candidate.strategy.name!r} cannot divide {candidate.model.label}"
    why = "transformers' code computes it; tp and pp need a model of gpt2, llama, mistral, qwen2 "
    raise UserError(what, f"{why}or qwen3")


def balanced_cut(size: ModelSize, seq_len: int, ranks: tuple[int, ...]) -> list[int]:
    """Blocks of each stage, at least one, so that the costliest process costs least.

    `ranks`: the process along pp that holds each stage, one or two a process. The cost is FLOPs a
    token; the output layer counts, looking embeddings up does not. Of two stages of a process the
    one that comes later in the model gets the odd block, in a V the earlier one: the simulator of
    pipedream_tutorial found these the shorter."""
    # Products of a token with a block's matrices, with the output layer's.
    block = sum(map(math.prod, size.block_matrices)) + 2 * size.attention_width * seq_len
    head = size.padded_vocab_size * size.hidden_size
    pp = max(ranks) + 1
    each = len(ranks) // pp
    last = ranks[-1]
    totals = [each] * pp
    costs = [each * block] * pp
    costs[last] += head
    for _ in range(size.num_layers - len(ranks)):
        # On a tie to the process with the output layer: others have less to do.
        rank = min(range(pp), key=lambda rank: (costs[rank], rank != last))
        totals[rank] += 1
        costs[rank] += block
    if each == 1:
        return totals
    v_shaped = ranks[pp] == pp - 1
    first = [-(-total // 2) if v_shaped else total // 2 for total in totals]
    # The stage with the output layer is to cost what the other one of its process does.
    first[last] = totals[last] - max(1, (totals[last] * block - head) // (2 * block))
    second = [total - blocks for total, blocks in zip(totals, first, strict=True)]
    return first + (second[::-1] if v_shaped else second)


def cut_batch(candidate: Candidate) -> Batch:
    """The batch of one step, cut as CONFIG says or, where CONFIG says "auto", by one rule.

    The rule: the fewest micro-batches that the schedule takes, of which there are at least 2 x pp,
    and whose activations need no more memory than `batch_size` sequences do under dp. Where the
    batch does not allow both, memory counts first."""
    config = candidate.config
    pp = candidate.mesh["pp"]
    num_replicas = candidate.mesh["dp_replicate"] * candidate.mesh["dp_shard"]
    of_each = int(config.batch_size) * config.grad_accum_steps
    global_batch_size = of_each * math.prod(candidate.mesh.values())
    sequences = global_batch_size // num_replicas  # tp x pp divides it, so nothing is rounded
    possible = candidate.schedule.counts(pp, sequences)
    counts = [
        count
        for count in possible
        if config.micro_batch_size in (AUTO, sequences // count)
        and config.num_microbatches in (AUTO, count)
    ]
    if not counts:
        raise _refusal(candidate, possible, sequences)
    # Of the 16 values that a block keeps (predict/memory.py), 4 lie between the split layers, where
    # only sequence parallelism divides them.
    tp = candidate.mesh["tp"]
    share = 1 / tp if config.sequence_parallel else (4 + 12 / tp) / 16

    def fits(count: int) -> bool:
        size = sequences // count
        kept = size * candidate.schedule.kept(pp, count) / pp * share
        # The loss is computed one micro-batch at a time, its logits divided over tp.
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
    """What does not fit, and the nearest cuts that do: there always is one, into single ones."""
    config = candidate.config
    pp = candidate.mesh["pp"]
    keys = ("micro_batch_size", "num_microbatches")
    asked = {key: getattr(config, key) for key in keys if getattr(config, key) != AUTO}
    wanted = asked.get("num_microbatches") or sequences / asked["micro_batch_size"]
    nearest = sorted(counts, key=lambda count: abs(math.log(count / wanted)))[:3]
    cuts = [f"micro_batch_size={sequences // n} num_microbatches={n}" for n in sorted(nearest)]
    what = f"{' with '.join(f'{key}={value}' for key, value in asked.items())} does not fit: a "
    what += f"replica has {sequences} sequences per step (batch_size {config.batch_size} x "
    what += f"grad_accum_steps {config.grad_accum_steps} x its processes)"
    why = "micro_batch_size x num_microbatches must be that number"
    if pp > 1:
        schedule = candidate.strategy.schedule(config)
        why += f", and num_microbatches one that {schedule} over pp={pp} takes"
    return UserError(what, why, f"set {'; or '.join(cuts)}; or both to auto")
