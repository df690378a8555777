import dataclasses
import itertools
from pathlib import Path

import pytest

from distributed_training.plan.layouts import fill_mesh
from distributed_training.plan.topology import Topology
from tests.plan.helpers import candidate
from tests.support import refused

WHOLE = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "tp": 1}


def filled(axes, world_size):
    """The mesh that a strategy with these axes gets."""
    asked = candidate(strategy="3d", model="gpt2")
    strategy = dataclasses.replace(asked.strategy, mesh={**WHOLE, **axes}, source=Path("x.json"))
    return fill_mesh(dataclasses.replace(asked, strategy=strategy), world_size)


@pytest.mark.parametrize(
    ("axes", "world_size", "mesh"),
    [
        ({"dp_replicate": 2, "dp_shard": 3}, 6, {}),
        ({"dp_replicate": -1, "dp_shard": 3}, 6, {"dp_replicate": 2}),
        ({"dp_replicate": 2, "dp_shard": -1}, 2, {"dp_shard": 1}),
        ({"pp": 2, "dp_shard": -1, "tp": 2}, 16, {"dp_shard": 4}),
    ],
)
def test_the_open_axis_takes_what_is_left(axes, world_size, mesh):
    found = filled(axes, world_size)
    assert list(found.items()) == list({**WHOLE, **axes, **mesh}.items()), "the slowest first"


@pytest.mark.parametrize(
    ("axes", "world_size", "said"),
    [
        ({"dp_replicate": 2, "dp_shard": -1}, 3, "x.json needs a multiple of 2"),
        # Of a closed mesh no multiple would do.
        ({"dp_replicate": 2, "dp_shard": 2}, 8, "x.json needs 4"),
        ({"dp_shard": 4}, 2, "needs 4"),
        ({"dp_replicate": -1, "dp_shard": -1}, 4, "at most one axis may be -1"),
        ({"dp_replicate": 0, "dp_shard": -1}, 4, "at most one axis may be -1"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(axes, world_size, said):
    with refused(said):
        filled(axes, world_size)


def test_tp_is_innermost_and_every_place_is_taken_once():
    mesh = {"pp": 2, "dp_replicate": 2, "dp_shard": 3, "tp": 4}
    all_of_them = [
        Topology(world_size=48, rank=rank, local_rank=rank, device_type="cpu", **mesh)
        for rank in range(48)
    ]
    places = [(one.pp_rank, one.dp_rank, one.tp_rank) for one in all_of_them]
    assert places == list(itertools.product(range(2), range(6), range(4)))
    assert all_of_them[0].axes == mesh
