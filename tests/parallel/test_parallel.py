"""What FSDP is told, with a process group that communicates nothing."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from distributed_training.models.gpt2 import SIZES
from distributed_training.models.gpt2 import build as build_model
from distributed_training.parallel.blocks import apply_fsdp
from distributed_training.plan.topology import Topology

WORLD_SIZE = 4


@pytest.fixture(autouse=True)
def _group():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    yield
    dist.destroy_process_group()


def applied(dp_replicate, dp_shard):
    model = build_model(SIZES["gpt2-tiny"], dropout=0.0, seed=0)
    topology = Topology(
        world_size=WORLD_SIZE,
        rank=0,
        local_rank=0,
        dp_replicate=dp_replicate,
        dp_shard=dp_shard,
        device_type="cpu",
    )
    axes = ("dp_replicate", "dp_shard") if dp_replicate > 1 else ("dp_shard",)
    apply_fsdp(model, topology.build_mesh()[axes], torch.bfloat16)
    return model


@pytest.mark.parametrize(
    ("dp_replicate", "dp_shard", "names", "placements"),
    [
        (1, 4, ("dp_shard",), (Shard(0),)),
        (2, 2, ("dp_replicate", "dp_shard"), (Replicate(), Shard(0))),
        (4, 1, ("dp_replicate", "dp_shard"), (Replicate(), Shard(0))),
    ],
)
def test_parameters_are_sharded_within_and_replicated_across(
    dp_replicate, dp_shard, names, placements
):
    for name, parameter in applied(dp_replicate, dp_shard).named_parameters():
        assert isinstance(parameter, DTensor), name
        assert parameter.device_mesh.mesh_dim_names == names
        assert parameter.device_mesh.size() == WORLD_SIZE
        assert parameter.placements == placements
        held = parameter.to_local().numel()
        assert held == -(-parameter.shape[0] // dp_shard) * parameter[0:1].numel(), name


def test_every_block_is_a_unit_of_its_own():
    """Otherwise all parameters would be gathered at once."""
    model = applied(1, WORLD_SIZE)
    units = [type(module).__name__ for module in model.modules() if hasattr(module, "unshard")]
    assert len(units) == 1 + len(model.blocks)
