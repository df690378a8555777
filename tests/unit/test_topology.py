from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distributed_training import launch
from distributed_training.strategy import Strategy
from distributed_training.topology import build_topology, process_group
from tests.unit.conftest import named_strategy, refused


def with_mesh(**axes):
    return Strategy(name="x", source=Path("x.json"), document={"mesh": axes})


def place(strategy, world_size, rank=0):
    return build_topology(
        strategy, world_size=world_size, rank=rank, local_rank=rank, device_type="cpu"
    )


@pytest.mark.parametrize("name", ["dp", "zero1", "zero2", "zero3", "offload", "infinity", "fsdp"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_every_strategy_uses_every_process(name, world_size):
    topology = place(named_strategy(name), world_size, rank=world_size - 1)
    assert topology.dp_replicate * topology.dp_shard == world_size == topology.dp_size
    assert topology.dp_rank == world_size - 1
    assert (topology.dp_replicate, topology.dp_shard) == (
        (world_size, 1) if name == "dp" else (1, world_size)
    )


@pytest.mark.parametrize("replicate", [1, 2, 3])
@pytest.mark.parametrize("shard", [1, 2, 4])
def test_the_open_axis_takes_what_is_left(replicate, shard):
    world_size = replicate * shard
    for axes in (
        {"dp_replicate": replicate, "dp_shard": shard},
        {"dp_replicate": -1, "dp_shard": shard},
        {"dp_replicate": replicate, "dp_shard": -1},
    ):
        topology = place(with_mesh(**axes), world_size)
        assert (topology.dp_replicate, topology.dp_shard) == (replicate, shard)


@pytest.mark.parametrize(
    ("axes", "world_size"),
    [
        ({"dp_replicate": 2, "dp_shard": -1}, 3),
        ({"dp_replicate": 2, "dp_shard": 2}, 8),
        ({"dp_replicate": 2, "dp_shard": 2}, 2),
        ({"dp_shard": 4}, 2),
        ({}, 2),
    ],
)
def test_a_product_that_is_not_the_world_size_is_refused(axes, world_size):
    with refused(f"does not make {world_size} processes", "x.json"):
        place(with_mesh(**axes), world_size)


@pytest.mark.parametrize(
    "axes",
    [
        {"dp_replicate": -1, "dp_shard": -1},
        {"dp_replicate": 0, "dp_shard": -1},
        {"dp_replicate": -2, "dp_shard": -2},
        {"dp_replicate": -2, "dp_shard": -1},
    ],
)
def test_a_mesh_without_meaning_is_refused(axes):
    with refused("mesh dp_replicate", "at most one axis may be -1"):
        place(with_mesh(**axes), 4)


def test_the_advice_for_a_closed_mesh_would_work():
    with refused("start 2 processes"):  # not "a multiple of 2": 4 is one
        place(with_mesh(dp_shard=2), 4)

    with refused("start a multiple of 2 processes"):
        place(with_mesh(dp_replicate=2, dp_shard=-1), 3)


def test_device_is_the_local_ranks():
    make = dict(world_size=4, rank=3, local_rank=1)
    strategy = named_strategy("dp")
    assert build_topology(strategy, **make, device_type="cuda").device == torch.device("cuda", 1)
    assert build_topology(strategy, **make, device_type="cpu").device == torch.device("cpu")


@pytest.fixture
def _one_process(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # so that what alone() sets is undone afterwards
    monkeypatch.setenv("MASTER_ADDR", "")
    monkeypatch.setenv("MASTER_PORT", "")
    launch.alone()


@pytest.mark.usefixtures("_one_process")
def test_process_group_starts_and_ends():
    with process_group(place(named_strategy("dp"), 1)):
        assert (dist.get_world_size(), dist.get_backend()) == (1, "gloo")
    assert not dist.is_initialized()


@pytest.mark.usefixtures("_one_process")
def test_process_group_ends_after_an_error():
    with pytest.raises(KeyError), process_group(place(named_strategy("dp"), 1)):
        raise KeyError
    assert not dist.is_initialized()
