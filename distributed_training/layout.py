"""How a model is laid over the mesh: which blocks each pipeline stage gets, which layouts exist.

No torch import. A stage is a run of consecutive blocks; the first also holds the embeddings, the
last the final norm and the output layer, which has the tied embedding's weights once more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from distributed_training.config import RunConfig
from distributed_training.errors import UserError
from distributed_training.sizes import ModelSize
from distributed_training.strategy import Strategy
from distributed_training.topology import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleRule:
    """What one pipeline schedule asks for."""

    bubble: Callable[[int, int], float | None]
    """(pp, micro-batches) -> idle share of a step if all stages took equally long and a backward
    pass twice a forward one (the tutorial's closed_forms.py); None where there is no formula."""
    stages_per_rank: int = 1
    v_shaped: bool = False
    """Rank r holds stages r and 2 pp - 1 - r instead of r and pp + r."""
    splits_backward: bool = False
    """Whether the gradients of inputs and of weights are computed at different times."""
    minimum: Callable[[int], int] = lambda pp: 1
    """pp -> fewest micro-batches."""
    equal_rounds: bool = False
    """Whether the micro-batches must make max(1, m // pp) rounds of equal length."""


def _share(idle: int, busy: int) -> float:
    return idle / (busy + idle)


# Rules of torch.distributed.pipelining's schedules.
SCHEDULE_RULES: dict[str, ScheduleRule] = {
    "gpipe": ScheduleRule(bubble=lambda p, m: _share(p - 1, m)),
    "1f1b": ScheduleRule(bubble=lambda p, m: _share(p - 1, m), minimum=lambda p: p),
    "interleaved": ScheduleRule(
        bubble=lambda p, m: _share(p - 1 if m >= p else 2 * (p - m) + m - 1, 2 * m),
        stages_per_rank=2,
        equal_rounds=True,
    ),
    "zb-h1": ScheduleRule(
        bubble=lambda p, m: _share(2 * (p - 1) - (min(m, p) - 1), 3 * m),
        splits_backward=True,
        equal_rounds=True,
    ),
    "zb-v": ScheduleRule(
        bubble=lambda p, m: _share(p - 1, 6 * m) if m >= 2 * p - 1 else None,
        stages_per_rank=2,
        v_shaped=True,
        splits_backward=True,
    ),
}


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
    _check_tp(config, strategy, size, topology)
    if topology.pp == 1:
        if config.pipeline_cut is not None:
            raise UserError("pipeline_cut is set but there is no pipeline", fix="set it to None")
        return Layout(
            stages=(range(size.num_layers),),
            ranks=(0,),
            num_parameters=-(-size.num_parameters // topology.tp),
        )
    rule = SCHEDULE_RULES["1f1b" if strategy.engine == "deepspeed" else config.pipeline_schedule]
    if strategy.engine == "deepspeed":
        _check_deepspeed(config, strategy)
    else:
        _check_microbatches(config, rule, topology.pp)
        _check_recomputation(config, rule)
    num_stages = topology.pp * rule.stages_per_rank
    if num_stages > size.num_layers:
        most = size.num_layers // rule.stages_per_rank
        fitting = _instead(strategy, topology, "pp", list(range(most, 0, -1)))
        raise UserError(
            f"pp={topology.pp} needs {num_stages} stages but {config.model} has "
            f"{size.num_layers} blocks",
            f"pipeline_schedule={config.pipeline_schedule!r} has {rule.stages_per_rank} a process",
            f"{fitting}, or take a larger model",
        )
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


def _instead(strategy: Strategy, topology: Topology, axis: str, sizes: list[int]) -> str:
    """Up to three other sizes of `axis` as settings to type, with the copies that take up the
    processes; "" where there are none."""
    whole = topology.axes[axis] * topology.dp_replicate
    texts = [f"{axis}={n}" for n in sizes if whole % n == 0]
    if strategy.engine == "native":  # DeepSpeed's data-parallel axis is what is left
        texts = [f"{axis}={n}, dp_replicate={whole // n}" for n in sizes if whole % n == 0]
    return f"set {'; or '.join(texts[:3])}" if texts else ""


def _check_tp(config: RunConfig, strategy: Strategy, size: ModelSize, topology: Topology) -> None:
    tp = topology.tp
    if tp > 1 and size.num_heads % tp:
        fitting = [n for n in range(1, size.num_heads + 1) if size.num_heads % n == 0]
        raise UserError(
            f"tp={tp} does not divide num_heads={size.num_heads} of {config.model}",
            "attention is split by heads",
            _instead(strategy, topology, "tp", fitting[1:])
            or f"start {' or '.join(map(str, fitting[1:]))} processes, or take fsdp",
        )
    if tp > 1 and config.sequence_parallel and config.seq_len % tp:
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
    words = config.pipeline_cut.split(",")
    counts = [int(word) if word.strip().isdecimal() else 0 for word in words]
    if len(counts) != num_stages or min(counts) < 1 or sum(counts) != size.num_layers:
        example = balanced_cut(size, config.seq_len, ranks)
        raise UserError(
            f"pipeline_cut={config.pipeline_cut!r} is not {num_stages} numbers that add up to "
            f"the {size.num_layers} blocks of {config.model}",
            fix=f"write {','.join(map(str, example))}, for example, or None",
        )
    return counts
