"""How a model is laid over the mesh: which blocks each pipeline stage gets, what is refused.

No torch import. A stage is a run of consecutive blocks; the first also holds the embeddings, the
last the final norm and the output layer, which has the tied embedding's weights once more.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from distributed_training.config import RunConfig
from distributed_training.errors import UserError
from distributed_training.layout_rules import (
    ScheduleRule,
    advise,
    larger_model,
    read_cut,
    rule_of,
)
from distributed_training.sizes import ModelSize
from distributed_training.strategy import Strategy
from distributed_training.topology import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The stages of a pipeline; one stage with all blocks where there is none."""

    stages: tuple[range, ...]
    """Blocks of each stage, in the model's order."""
    ranks: tuple[int, ...]
    """Place along pp that holds each stage."""
    num_parameters: int
    """Parameters of the process that holds most, padding not counted, before dp_shard divides."""


def build_layout(
    config: RunConfig, strategy: Strategy, size: ModelSize, topology: Topology
) -> Layout:
    """Cut the model for this topology; raise UserError for a layout that cannot be."""
    # Axes first: with other axes the rest may be in order, and axes that are suggested come with
    # what else they need.
    _check_heads(config, strategy, size, topology)
    _check_blocks(config, strategy, size, topology)
    _check_tokens(config, topology.tp)
    if topology.pp == 1:
        if config.pipeline_cut is not None:
            raise UserError("pipeline_cut is set but there is no pipeline", fix="set it to None")
        return Layout(
            stages=(range(size.num_layers),),
            ranks=(0,),
            num_parameters=-(-size.num_parameters // topology.tp),
        )
    rule = rule_of(config, strategy)
    if strategy.engine == "deepspeed":
        _check_deepspeed(config, strategy)
    else:
        _check_microbatches(config, rule, topology.pp)
        _check_recomputation(config, rule)
    num_stages = topology.pp * rule.stages_per_rank
    ranks = tuple(_rank_of(stage, topology.pp, rule.v_shaped) for stage in range(num_stages))
    counts = _given_cut(config, size, ranks) or balanced_cut(size, config.seq_len, ranks)
    ends = [sum(counts[: i + 1]) for i in range(num_stages)]
    stages = tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))
    held = [0] * topology.pp
    for stage, rank in enumerate(ranks):
        held[rank] += stage_parameters(size, stages, stage)
    return Layout(stages=stages, ranks=ranks, num_parameters=-(-max(held) // topology.tp))


def balanced_cut(size: ModelSize, seq_len: int, ranks: tuple[int, ...]) -> list[int]:
    """Blocks of each stage, at least one, so that the costliest process costs least.

    `ranks`: the process along pp that holds each stage, one or two a process. The cost is FLOPs a
    token; the output layer counts, looking embeddings up does not. Of two stages of a process the
    one that comes later in the model gets the odd block, in a V the earlier one: the simulator of
    pipedream_tutorial found these the shorter.
    """
    head = Fraction(output_flops(size), block_flops(size, seq_len))  # in blocks
    pp = max(ranks) + 1
    each = len(ranks) // pp
    v_shaped = each > 1 and ranks[pp] == pp - 1

    def others(last: int) -> int:
        """Blocks of the costliest process that has not the output layer."""
        return -(-(size.num_layers - last) // (pp - 1))

    choices = range(each, size.num_layers - each * (pp - 1) + 1)
    last = min(choices, key=lambda blocks: max(Fraction(others(blocks)), blocks + head))
    rest = size.num_layers - last
    totals = [rest // (pp - 1) + (i < rest % (pp - 1)) for i in range(pp - 1)]
    totals.insert(ranks[-1], last)
    if each == 1:
        return totals
    first = [-(-total // 2) if v_shaped else total // 2 for total in totals]
    # The stage with the output layer is to cost what the other one of its process does.
    first[ranks[-1]] = last - max(1, int((last - head) / 2))
    second = [total - blocks for total, blocks in zip(totals, first, strict=True)]
    return first + (second[::-1] if v_shaped else second)


def block_flops(size: ModelSize, seq_len: int) -> int:
    """FLOPs of one block for one token, forward and backward."""
    d = size.hidden_size
    return 6 * 12 * d * d + 12 * d * seq_len


def output_flops(size: ModelSize) -> int:
    """FLOPs of the output layer for one token, forward and backward."""
    return 6 * size.padded_vocab_size * size.hidden_size


def stage_parameters(size: ModelSize, stages: tuple[range, ...], stage: int) -> int:
    """Parameters of one stage, padding not counted; both ends hold the tied embedding."""
    d = size.hidden_size
    count = len(stages[stage]) * (12 * d * d + 13 * d)
    if stage == 0:
        count += (size.vocab_size + size.num_positions) * d
    if stage == len(stages) - 1:
        count += 2 * d + (size.vocab_size * d if stage else 0)
    return count


def _rank_of(stage: int, pp: int, v_shaped: bool) -> int:
    return min(stage, 2 * pp - 1 - stage) if v_shaped else stage % pp


def _check_heads(
    config: RunConfig, strategy: Strategy, size: ModelSize, topology: Topology
) -> None:
    if size.num_heads % topology.tp:
        raise UserError(
            f"tp={topology.tp} does not divide num_heads={size.num_heads} of {config.model}",
            "attention is split by heads",
            advise(strategy, topology.world_size, config, size),
        )


def _check_blocks(
    config: RunConfig, strategy: Strategy, size: ModelSize, topology: Topology
) -> None:
    each = rule_of(config, strategy).stages_per_rank
    if topology.pp > 1 and topology.pp * each > size.num_layers:
        larger = larger_model(config, strategy, size, topology.axes)
        raise UserError(
            f"pp={topology.pp} needs {topology.pp * each} stages but {config.model} has "
            f"{size.num_layers} blocks",
            f"pipeline_schedule={config.pipeline_schedule!r} has {each} a process",
            advise(strategy, topology.world_size, config, size, also=larger),
        )


def _check_tokens(config: RunConfig, tp: int) -> None:
    if config.sequence_parallel and config.seq_len % tp:
        near = config.seq_len - config.seq_len % tp
        raise UserError(
            f"max_length={config.seq_len} is not a multiple of tp={tp}",
            "sequence_parallel splits the tokens of a sample evenly",
            f"set max_length to {near or tp}, or sequence_parallel to False",
        )


def _check_microbatches(config: RunConfig, rule: ScheduleRule, pp: int) -> None:
    m = config.grad_accum_steps
    least = rule.minimum(pp)
    if m < least:
        raise UserError(
            f"pipeline_schedule={config.pipeline_schedule!r} over pp={pp} needs {least} "
            f"micro-batches or more, and grad_accum_steps={m}",
            "the micro-batches of one step are what fills the pipeline",
            f"set grad_accum_steps to {least} or more (4 x pp = {4 * pp} keeps stages busy), "
            "or pipeline_schedule to gpipe",
        )
    rounds = max(1, m // pp)
    if rule.equal_rounds and m % rounds:
        raise UserError(
            f"pipeline_schedule={config.pipeline_schedule!r} cannot cut grad_accum_steps={m} into "
            f"{rounds} equal rounds",
            f"over pp={pp} it works in rounds of about {pp} micro-batches",
            f"set grad_accum_steps to {rounds * pp} or {(rounds + 1) * pp}",
        )


def _check_recomputation(config: RunConfig, rule: ScheduleRule) -> None:
    if rule.splits_backward and config.activation_checkpointing != "none":
        raise UserError(
            f"activation_checkpointing={config.activation_checkpointing!r} does not go with "
            f"pipeline_schedule={config.pipeline_schedule!r}",
            "the schedule goes backward through a block in pieces, and each would compute it anew",
            "set it to none, or pipeline_schedule to 1f1b",
        )


def _check_deepspeed(config: RunConfig, strategy: Strategy) -> None:
    if config.pipeline_schedule != "1f1b":
        raise UserError(
            f"pipeline_schedule={config.pipeline_schedule!r} cannot be set with "
            f"strategy={strategy.name!r}",
            "DeepSpeed's pipeline engine has 1F1B only",
            "set it to 1f1b, or strategy to pp or 3d",
        )


def _given_cut(config: RunConfig, size: ModelSize, ranks: tuple[int, ...]) -> list[int] | None:
    if config.pipeline_cut is None:
        return None
    num_stages = len(ranks)
    counts = read_cut(config.pipeline_cut, size, num_stages)
    if counts is None:
        example = balanced_cut(size, config.seq_len, ranks)
        raise UserError(
            f"pipeline_cut={config.pipeline_cut!r} is not {num_stages} numbers that add up to "
            f"the {size.num_layers} blocks of {config.model}",
            fix=f"write {','.join(map(str, example))}, for example, or None",
        )
    return counts
