"""Draw each GPU's state and work as text, for the first section of each strategy's page.

A bar represents the whole model, from the first layer to the last. The filled part shows the layers
that a process holds. Sizes come from a run's plan. This module does not import torch."""

from collections.abc import Sequence
from dataclasses import replace

from distributed_training.models.size import ModelSize
from distributed_training.parallel.mesh import Topology
from distributed_training.plan.plan import Draft
from distributed_training.predict.memory import estimate_memory
from results.lab.pages.laws import GIB, plan_of

NUM_PROCESSES = 4
WIDTH = 8  # width of a bar in characters
MODEL = "gpt2-xl-20-heads"  # tp divides the number of heads.
LABEL_FORMAT = "{:<34}"
CELL_FORMAT = "{:<10}"


def drawing(strategy: str) -> str:
    """Return a fenced block that shows the state, blocks and samples of each of four processes."""
    plan = plan_of(strategy, NUM_PROCESSES, model=MODEL)
    topologies = [
        Topology(
            world_size=NUM_PROCESSES, rank=rank, local_rank=rank, device_type="cuda", **plan.mesh
        )
        for rank in range(NUM_PROCESSES)
    ]
    lines = [_line(f"{MODEL} in bf16 (GiB)", [f"GPU {rank}" for rank in range(NUM_PROCESSES)])]
    for label, size, is_sharded in _state_rows(plan):
        bars = [_bar(plan, topology, is_sharded) for topology in topologies]
        lines.append(_line(f"{label} {_size_range(plan, size)}", bars))
    lines.append(_line("blocks computed", [_blocks(plan, topology) for topology in topologies]))
    replicas = topologies[0].dp_size
    share = f"1/{replicas}" if replicas > 1 else "all"
    lines.append(_line("samples", [share] * NUM_PROCESSES))
    if (cp := topologies[0].cp) > 1:
        lines.append(_line("tokens of each sample", [f"1/{cp}"] * NUM_PROCESSES))
    return "\n```text\n" + "\n".join(lines) + "\n```\n"


def _line(first: str, cells: list[str]) -> str:
    return (LABEL_FORMAT.format(first) + "".join(map(CELL_FORMAT.format, cells))).rstrip()


def _state_rows(plan: Draft) -> list[tuple[str, int, bool]]:
    """Return one row for each kind of state: a label, the number of bytes on the fullest process,
    and whether dp_shard shards this state."""
    strategy = plan.strategy
    state = estimate_memory(plan).state
    unsharded_state = estimate_memory(
        replace(plan, mesh={**plan.mesh, "dp_shard": 1, "cp": 1})
    ).state
    offloaded: dict[str, list[str]] = {"host": [], "disk": []}
    memories = {"cpu": "host", "nvme": "disk"}
    for name, section in (("parameters", "param"), ("optimizer", "optimizer")):
        device = strategy.offload[section]
        if device != "none":
            offloaded[memories[device]].append(name)
    if strategy.steps_on_host:
        offloaded["host"].append("gradients")
    kinds = []
    for name in ("parameters", "gradients", "optimizer"):
        size = state[name]
        if size:
            kinds.append((name, size, size < unsharded_state[name]))
    for memory, names in offloaded.items():
        if names:
            label = f"{'RAM' if memory == 'host' else 'files'}: {', '.join(names)}"
            size = state[memory]
            kinds.append((label, size, size < unsharded_state[memory]))
    return kinds


def stage_parameters(size: ModelSize, blocks_per_stage: Sequence[int], stage: int) -> int:
    """Return the number of parameters in one stage, without padding. A tied embedding is counted in
    both the first and the last stage."""
    count = blocks_per_stage[stage] * size.block_parameters // size.num_layers
    if stage == 0:
        count += size.embedding_parameters + size.position_parameters
    if stage == len(blocks_per_stage) - 1:
        own_rows = stage > 0 or not size.tied
        count += size.final_norm_parameters + own_rows * size.embedding_parameters
    return count


def _parameters_per_rank(plan: Draft) -> list[int]:
    """Return the number of parameters on each pipeline rank before tp and dp_shard shard them."""
    blocks_per_stage = plan.stages.blocks_per_stage
    parameters = [0] * plan.mesh["pp"]
    for stage, rank in enumerate(plan.stages.ranks):
        parameters[rank] += stage_parameters(plan.size, blocks_per_stage, stage)
    return parameters


def _size_range(plan: Draft, size: int) -> str:
    parameters_per_rank = _parameters_per_rank(plan)
    most, least = (
        f"{size * part / max(parameters_per_rank) / GIB:.1f}"
        for part in (max(parameters_per_rank), min(parameters_per_rank))
    )
    return most if most == least else f"{least} to {most}"


def _bar(plan: Draft, topology: Topology, is_sharded: bool) -> str:
    parameters_per_rank = _parameters_per_rank(plan)
    rank = topology.pp_rank
    begin = sum(parameters_per_rank[:rank]) / sum(parameters_per_rank)
    end = sum(parameters_per_rank[: rank + 1]) / sum(parameters_per_rank)
    num_parts = topology.tp
    part = topology.tp_rank
    if is_sharded:
        num_parts, part = (
            num_parts * topology.dp_shard * topology.cp,
            part + num_parts * (topology.rank // topology.tp % (topology.dp_shard * topology.cp)),
        )
    first = round(WIDTH * (begin + (end - begin) * part / num_parts))
    last = round(WIDTH * (begin + (end - begin) * (part + 1) / num_parts))
    return "·" * first + "█" * (last - first) + "·" * (WIDTH - last)


def _blocks(plan: Draft, topology: Topology) -> str:
    cut = plan.stages.blocks_per_stage
    ranks = plan.stages.ranks
    count = sum(cut[stage] for stage, rank in enumerate(ranks) if rank == topology.pp_rank)
    return f"{count}" if topology.tp == 1 else f"{count}/{topology.tp}"
