import dataclasses
from pathlib import Path

import pytest

from distributed_training.plan.mesh import fill_mesh
from distributed_training.plan.topology import Topology
from tests.plan.helpers import candidate
from tests.support import refused

WHOLE = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "tp": 1}


def filled(axes, world_size):
    """The mesh that a strategy with these axes gets."""
    asked = candidate(strategy="3d", model="gpt2")
    strategy = dataclasses.replace(asked.strategy, mesh={**WHOLE, **axes}, source=Path("x.json"))
    return fill_mesh(dataclasses.replace(asked, strategy=strategy), world_size)


def place(rank, world_size, **mesh):
    return Topology(
        world_size=world_size, rank=rank, local_rank=rank, device_type="cpu", **{**WHOLE, **mesh}
    )


@pytest.mark.parametrize(
    ("axes", "world_size", "mesh"),
    [
        ({"dp_replicate": 2, "dp_shard": 3}, 6, {"dp_replicate": 2, "dp_shard": 3}),
        ({"dp_replicate": -1, "dp_shard": 3}, 6, {"dp_replicate": 2, "dp_shard": 3}),
        ({"dp_replicate": 2, "dp_shard": -1}, 2, {"dp_replicate": 2, "dp_shard": 1}),
        ({"pp": 2, "dp_shard": -1, "tp": 2}, 16, {"pp": 2, "dp_shard": 4, "tp": 2}),
        ({"pp": -1, "tp": 2}, 6, {"pp": 3, "tp": 2}),
    ],
)
def test_the_open_axis_takes_what_is_left(axes, world_size, mesh):
    found = filled(axes, world_size)
    assert found == {**WHOLE, **mesh}
    assert list(found) == list(WHOLE), "the slowest axis first"


@pytest.mark.parametrize(
    ("axes", "world_size", "words"),
    [
        ({"dp_replicate": 2, "dp_shard": -1}, 3, ("needs a multiple of 2",)),
        # Of a closed mesh no multiple would do.
        ({"dp_replicate": 2, "dp_shard": 2}, 8, ("needs 4",)),
        ({"dp_shard": 4}, 2, ("needs 4",)),
    ],
)
def test_a_product_that_is_not_the_world_size_is_refused(axes, world_size, words):
    with refused(f"does not make {world_size} processes", "x.json", *words):
        filled(axes, world_size)


@pytest.mark.parametrize("first", [-1, 0, -2])
def test_a_mesh_without_meaning_is_refused(first):
    with refused("mesh dp_replicate", "at most one axis may be -1"):
        filled({"dp_replicate": first, "dp_shard": -1}, 4)


@pytest.mark.parametrize(
    "mesh", [{"pp": 2, "dp_replicate": 2, "dp_shard": 3, "tp": 4}, {"pp": 3, "dp_shard": 2}]
)
def test_tp_is_innermost_and_every_place_is_taken_once(mesh):
    world_size = mesh["pp"] * mesh.get("dp_replicate", 1) * mesh.get("dp_shard", 1)
    world_size *= mesh.get("tp", 1)
    topologies = [place(rank, world_size, **mesh) for rank in range(world_size)]
    places = [(one.pp_rank, one.dp_rank, one.tp_rank) for one in topologies]
    assert places == sorted(set(places)), "rank order is (pp, dp, tp), tp fastest"
    assert len(places) == world_size
    assert topologies[0].axes == {**WHOLE, **mesh}
