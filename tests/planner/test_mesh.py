"""Test inferred mesh axes and the errors for invalid meshes."""

import itertools
import os

import pytest

from distributed_training.parallel.mesh import Topology, set_nccl_variables
from distributed_training.planner.layouts import fill_mesh
from distributed_training.settings.strategies import MESH_AXES
from tests.planner.helpers import candidate
from tests.support import refused


@pytest.mark.parametrize(
    ("axes", "world_size", "expected"),
    [
        ({"dp_replicate": 2, "dp_shard": 3}, 6, {}),
        ({"dp_replicate": -1, "dp_shard": 3}, 6, {"dp_replicate": 2}),
        ({"pp": 2, "dp_shard": -1, "tp": 2}, 16, {"dp_shard": 4}),
        ({"dp_replicate": 2, "dp_shard": -1}, 3, "multiple of 2"),
        # A mesh in which all axes are fixed does not accept multiples of its size.
        ({"dp_replicate": 2, "dp_shard": 2}, 8, "4 processes"),
        ({"dp_replicate": -1, "dp_shard": -1}, 4, "-1"),
    ],
)
def test_the_open_axis_of_a_strategy_takes_the_remaining_processes_or_is_refused(
    axes, world_size, expected
):
    mesh = {**dict.fromkeys(MESH_AXES, 1), **axes}
    requested = candidate(strategy="3d", model="gpt2", mesh=mesh)
    if isinstance(expected, dict):
        assert fill_mesh(requested, world_size) == {**mesh, **expected}
    else:
        with refused(expected):
            fill_mesh(requested, world_size)


def test_tp_is_innermost_and_every_rank_has_a_unique_position():
    mesh = {"pp": 2, "dp_replicate": 2, "dp_shard": 3, "cp": 2, "tp": 4}
    all_of_them = [
        Topology(world_size=96, rank=rank, local_rank=rank, device_type="cpu", **mesh)
        for rank in range(96)
    ]
    places = [(one.pp_rank, one.dp_rank, one.tp_rank) for one in all_of_them]
    by_cp = itertools.product(*map(range, (2, 6, 2, 4)))
    assert places == [(pp, dp, tp) for pp, dp, _, tp in by_cp]
    assert all_of_them[0].axes == mesh


@pytest.mark.parametrize("given", [{}, {"NCCL_GRAPH_REGISTER": "1"}])
@pytest.mark.parametrize("has_pipeline", [True, False])
def test_nccls_defaults_are_set_only_if_the_user_did_not(monkeypatch, given, has_pipeline):
    environment = dict(given)
    monkeypatch.setattr(os, "environ", environment)
    set_nccl_variables(has_pipeline=has_pipeline)
    channels = {"NCCL_MAX_P2P_NCHANNELS": "4"} if has_pipeline else {}
    defaults = {"NCCL_GRAPH_REGISTER": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    assert environment == defaults | channels | given
