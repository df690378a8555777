"""What a refusal suggests is accepted: every suggestion is typed in and goes through the checks."""

from __future__ import annotations

import functools
import itertools
import math
import re

import pytest

from distributed_training.plan.mesh import nearest_layouts, show_settings
from distributed_training.settings import strategies as strategy_module
from distributed_training.settings.errors import UserError
from distributed_training.settings.strategies import MESH_AXES
from tests.plan.helpers import candidate, lay_out

MODELS = ("gpt2-tiny", "gpt2", "gpt2-xl")
AXES = (
    "", "tp=3", "tp=5 dp_shard=1", "pp=99", "pp=3", "dp_shard=3", "pp=1 tp=8",
    "dp_replicate=2", "dp_replicate=-1 dp_shard=4", "tp=-1 dp_shard=1 pp=2",
)  # fmt: skip
NATIVE = tuple(itertools.product(("tp", "pp", "3d", "fsdp"), AXES))
HYBRID = tuple(("hybrid", axes) for axes in ("", "pp=3", "pp=5", "pp=99"))
OTHERS = (
    "batch_size=8",
    "num_microbatches=8 pipeline_schedule=interleaved max_length=1000",
    "grad_accum_steps=7 pipeline_schedule=zb-h1 activation_checkpointing=full",
    "pipeline_cut=6,6 pipeline_schedule=zb-v max_length=500 sequence_parallel=false",
    "micro_batch_size=3",
)


@pytest.fixture(autouse=True)
def _read_once(monkeypatch):
    """Thousands of layouts, and the strategies' files stay as they are."""
    for name in ("list_strategies", "_read_folder"):
        cached = functools.cache(getattr(strategy_module, name))
        monkeypatch.setattr(strategy_module, name, cached)


def suggestions(text):
    """Words to type, of all that a refusal suggests."""
    choices = re.search(r"; set (.+)$", text)
    for words in choices[1].split("; or ") if choices else []:
        yield words.split()
    fsdp = re.search(r"; take fsdp(?: with (.+))?$", text)
    if fsdp:
        yield ["strategy=fsdp", *(fsdp[1] or "").split()]


def of_the_layout(text):
    return any(part in text for part in ("does not make", "does not divide", "stages but"))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("strategy", "axes"), NATIVE + HYBRID)
def test_every_suggestion_is_accepted(model, strategy, axes):
    for world_size in range(1, 17):
        other = OTHERS[world_size % len(OTHERS)]
        asked = [f"model={model}", f"strategy={strategy}", *axes.split(), *other.split()]
        try:
            lay_out(world_size, *asked)
        except UserError as error:
            text = str(error)
        else:
            continue
        if not of_the_layout(text):
            continue
        found = list(suggestions(text))
        assert found, text
        for words in found:
            try:
                lay_out(world_size, *asked, *words)
            except UserError as error:
                pytest.fail(f"{world_size} processes, {asked}: {text}\n{words}: {error}")


@pytest.mark.parametrize(("strategy", "given"), [("3d", []), ("3d", ["dp_shard=3"])])
@pytest.mark.parametrize(("model", "world_size"), [("gpt2-tiny", 8), ("gpt2-xl", 20)])
def test_all_layouts_are_found_and_the_nearest_first(strategy, given, model, world_size):
    asked = [f"model={model}", f"strategy={strategy}", "max_length=500"]
    all_found = nearest_layouts(candidate(*asked, *given), world_size)
    found = [
        tuple(lay_out(world_size, *asked, *given, *show_settings(settings).split()).mesh.values())
        for settings in all_found
    ]
    existing = set()
    for sizes in itertools.product(range(1, world_size + 1), repeat=4):
        if math.prod(sizes) == world_size:
            words = [f"{axis}={n}" for axis, n in zip(MESH_AXES, sizes, strict=True)]
            try:
                lay_out(world_size, *asked, *words)
            except UserError:
                continue
            existing.add(sizes)
    assert set(found) == existing
    assert len(found) == len(set(found))
    lengths = [len(settings) for settings in all_found]
    assert lengths == sorted(lengths)


@pytest.mark.parametrize(
    ("strategy", "axes"),
    [("tp", {"tp", "dp_replicate", "dp_shard"}), ("pp", {"pp", "dp_replicate", "dp_shard"}),
     ("fsdp", {"dp_replicate"}), ("hybrid", {"pp"}), ("3d", {"pp", "tp", "dp_replicate"})],
)  # fmt: skip
def test_a_strategy_has_its_own_axes_and_data_parallel_ones(strategy, axes):
    asked = candidate(strategy=strategy, model="gpt2", sequence_parallel=False)
    found = nearest_layouts(asked, 12)
    assert {axis for settings in found for axis in settings} == axes
