"""Test inferred mesh axes and the errors for invalid meshes. Every suggestion in an error must be
accepted."""

import contextlib
import dataclasses
import functools
import itertools
import os
import re
from pathlib import Path

import pytest

from distributed_training.parallel.mesh import Topology, set_nccl_variables
from distributed_training.plan.schedules import divisors
from distributed_training.planner.layouts import fill_mesh, format_settings, nearest_layouts
from distributed_training.settings import strategies as strategy_module
from distributed_training.settings.errors import UserError
from distributed_training.settings.strategies import MESH_AXES
from tests.planner.helpers import candidate, lay_out
from tests.support import refused

AXES = (
    "", "tp=3", "tp=5 dp_shard=1", "pp=99", "pp=3", "dp_shard=3", "pp=1 tp=8",
    "dp_replicate=2", "dp_replicate=-1 dp_shard=4", "tp=-1 dp_shard=1 pp=2",
)  # fmt: skip
ASKED = [
    *itertools.product(("tp", "pp", "3d", "fsdp"), AXES),
    *itertools.product(["hybrid"], ("", "pp=3", "pp=5", "pp=99")),
]
OF_THE_LAYOUT = ("but the run has", "does not divide", "stages, but")
OTHERS = (
    "batch_size=8",
    "num_microbatches=8 pipeline_schedule=interleaved max_length=1000",
    "grad_accum_steps=7 pipeline_schedule=zb-h1 activation_checkpointing=full",
    "pipeline_cut=6,6 pipeline_schedule=zb-v max_length=500 sequence_parallel=false",
    "micro_batch_size=3",
)


@pytest.fixture(autouse=True)
def _read_once(monkeypatch):
    """Cache the strategies' files, because these tests build thousands of layouts."""
    for name in ("list_strategies", "_read_strategy_file"):
        cached = functools.cache(getattr(strategy_module, name))
        monkeypatch.setattr(strategy_module, name, cached)


def suggestions(text):
    """Yield each alternative that an error message suggests, as a list of arguments."""
    choices = re.search(r" Set (.+)\.$", text)
    for choice in choices[1].split(", or ") if choices else []:
        yield choice.split()


@pytest.mark.parametrize("model", ["gpt2-tiny", "gpt2", "gpt2-xl"])
@pytest.mark.parametrize(("strategy", "axes"), ASKED)
def test_every_suggestion_is_accepted(model, strategy, axes):
    for world_size in range(1, 17):
        other = OTHERS[world_size % len(OTHERS)]
        requested = [f"model={model}", f"strategy={strategy}", *axes.split(), *other.split()]
        try:
            lay_out(world_size, *requested)
        except UserError as error:
            text = str(error)
            if not any(part in text for part in OF_THE_LAYOUT):
                continue
            found = list(suggestions(text))
            assert found, text
            for overrides in found:
                lay_out(world_size, *requested, *overrides)


@pytest.mark.parametrize("given", [[], ["dp_shard=3"]])
@pytest.mark.parametrize(("model", "world_size"), [("gpt2-tiny", 8), ("gpt2-xl", 20)])
def test_all_layouts_are_found_and_the_nearest_first(given, model, world_size):
    overrides = [f"model={model}", "strategy=3d", "max_length=500"]
    all_found = nearest_layouts(candidate(*overrides, *given), world_size)
    found = [
        tuple(
            lay_out(
                world_size, *overrides, *given, *format_settings(settings).split()
            ).mesh.values()
        )
        for settings in all_found
    ]
    existing = []
    for sizes in itertools.product(divisors(world_size), repeat=4):
        axis_overrides = [f"{axis}={n}" for axis, n in zip(MESH_AXES, sizes, strict=True)]
        with contextlib.suppress(UserError):
            lay_out(world_size, *overrides, *axis_overrides)
            existing.append(sizes)
    assert sorted(found) == sorted(existing)
    lengths = [len(settings) for settings in all_found]
    assert lengths == sorted(lengths)


@pytest.mark.parametrize(
    ("axes", "world_size", "expected"),
    [
        ({"dp_replicate": 2, "dp_shard": 3}, 6, {}),
        ({"dp_replicate": -1, "dp_shard": 3}, 6, {"dp_replicate": 2}),
        ({"pp": 2, "dp_shard": -1, "tp": 2}, 16, {"dp_shard": 4}),
        ({"dp_replicate": 2, "dp_shard": -1}, 3, "a multiple of 2 processes, but the run has 3"),
        # A mesh in which all axes are fixed does not accept multiples of its size.
        ({"dp_replicate": 2, "dp_shard": 2}, 8, "needs 4 processes, but the run has 8"),
        ({"dp_replicate": -1, "dp_shard": -1}, 4, "at most one axis may be -1"),
        ({"dp_replicate": 0, "dp_shard": -1}, 4, "at most one axis may be -1"),
    ],
)
def test_the_open_axis_of_a_strategy_takes_the_remaining_processes_or_is_refused(
    axes, world_size, expected
):
    requested = candidate(strategy="3d", model="gpt2")
    mesh = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "tp": 1, **axes}
    strategy = dataclasses.replace(requested.strategy, mesh=mesh, source=Path("x.json"))
    requested = dataclasses.replace(requested, strategy=strategy)
    if isinstance(expected, dict):
        assert fill_mesh(requested, world_size) == {**mesh, **expected}
    else:
        with refused(expected):
            fill_mesh(requested, world_size)


def test_tp_is_innermost_and_every_rank_has_a_unique_position():
    mesh = {"pp": 2, "dp_replicate": 2, "dp_shard": 3, "tp": 4}
    all_of_them = [
        Topology(world_size=48, rank=rank, local_rank=rank, device_type="cpu", **mesh)
        for rank in range(48)
    ]
    places = [(one.pp_rank, one.dp_rank, one.tp_rank) for one in all_of_them]
    assert places == list(itertools.product(range(2), range(6), range(4)))
    assert all_of_them[0].axes == mesh


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"NCCL_GRAPH_REGISTER": "0", "NCCL_MAX_P2P_NCHANNELS": "4"}),
        ({"NCCL_GRAPH_REGISTER": "1"}, {"NCCL_GRAPH_REGISTER": "1", "NCCL_MAX_P2P_NCHANNELS": "4"}),
    ],
)
def test_nccl_registers_no_graph_buffers_by_default(monkeypatch, given, expected):
    environment = dict(given)
    monkeypatch.setattr(os, "environ", environment)
    set_nccl_variables("pp")
    assert environment == expected
