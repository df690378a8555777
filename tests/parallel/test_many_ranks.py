"""Set up 128 ranks on this machine with torch's fake process group, which sends nothing."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from distributed_training.models.gpt2 import SIZES, gpt2_size
from distributed_training.parallel.gradients import local_part
from distributed_training.predict.memory import estimate_state
from distributed_training.supervise.process import Process
from distributed_training.train.build import build_engine, build_topology
from tests.planner.helpers import plan_for
from tests.support import CPU_MACHINE

WORLD_SIZE, HERE = 128, 8
RANKS = (0, 37, 77, 127)  # one rank per stage if there are four stages
LAYOUTS = {
    "tp4 x pp4 x dp8": {"strategy": "3d", "tp": 4, "pp": 4, "num_microbatches": 4},
    "HSDP 16 x 8": {"strategy": "fsdp", "dp_replicate": 16, "dp_shard": 8},
}
SIZE = gpt2_size(vocab_size=2048, num_positions=64, num_layers=8, num_heads=8, hidden_size=128)


def set_up(plan, rank):
    """Build one rank's engine. Return the number of elements in the full parameters of its stage,
    the number of bytes in its shards, and the ranks in its tp group."""
    process = Process(
        rank=rank, world_size=WORLD_SIZE, local_rank=rank % HERE, local_world_size=HERE
    )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD_SIZE)
    try:
        topology = build_topology(plan, process, torch.device("cpu"))
        engine = build_engine(plan, topology)
        whole = sum(parameter.numel() for parameter in engine.parameters)
        part = sum(local_part(parameter).nbytes for parameter in engine.parameters)
        tp = [rank] if engine.tp_group is None else dist.get_process_group_ranks(engine.tp_group)
        return whole, part, tp
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_of_128_ranks_is_set_up_as_planned(name, tmp_path, monkeypatch):
    monkeypatch.setitem(SIZES, "eight", SIZE)
    work = {"model": "eight", "batch_size": 1, "max_length": 64}
    plan = plan_for(tmp_path, CPU_MACHINE, WORLD_SIZE, here=HERE, **work, **LAYOUTS[name])
    stages, tp, shards = plan.mesh["pp"], plan.mesh["tp"], plan.mesh["dp_shard"]
    found = {rank: set_up(plan, rank) for rank in RANKS}

    wholes = [whole for whole, _, _ in found.values()]
    # The last stage holds a copy of the embedding as its output layer.
    again = SIZE.vocab_size * SIZE.hidden_size if stages > 1 else 0
    expected = plan.size.num_parameters + again
    assert sum(wholes) == expected if stages > 1 else set(wholes) == {expected}
    for rank, (whole, part, together) in found.items():
        # The sizes are not exact, because tp does not shard vectors, and dp_shard shards rows
        # unevenly.
        assert part == pytest.approx(4 * whole / (tp * shards), rel=0.15), rank
        assert together == list(range(rank - rank % tp, rank - rank % tp + tp))
    fullest = max(part for _, part, _ in found.values())
    assert fullest == pytest.approx(estimate_state(plan)["optimizer"] / 2, rel=0.06)
