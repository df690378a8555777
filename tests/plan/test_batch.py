"""How a step's sequences are cut: identities over many layouts, and what a user may ask for."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed_training.plan.layouts import cut_batch
from distributed_training.plan.schedules import SCHEDULES, divisors
from distributed_training.settings.engines import MESH_AXES
from distributed_training.settings.errors import UserError
from tests.plan.helpers import candidate, lay_out

MESHES = st.fixed_dictionaries(dict.fromkeys(MESH_AXES, st.integers(1, 4)))
CONFIGS = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 12),
        "grad_accum_steps": st.integers(1, 9),
        "sequence_parallel": st.booleans(),
    }
)


def cut(mesh, name, **config):
    """(Batch, the schedule it is cut for)"""
    asked = candidate(mesh=mesh, strategy="3d", pipeline_schedule=name, **config)
    return cut_batch(asked), asked.schedule


@settings(max_examples=200, deadline=None)
@given(MESHES, st.sampled_from(sorted(SCHEDULES)), CONFIGS)
def test_the_rule(mesh, name, config):
    batch, schedule = cut(mesh, name, **config)
    sequences = batch.micro_batch_size * batch.num_microbatches
    budget = config["batch_size"]
    assert batch.num_replicas == mesh["dp_replicate"] * mesh["dp_shard"]
    assert batch.global_batch_size == budget * config["grad_accum_steps"] * math.prod(mesh.values())
    assert batch.global_batch_size == sequences * batch.num_replicas
    possible = [n for n in divisors(sequences) if schedule.takes(mesh["pp"], n)]

    def held(count):
        """Memory of activations, in sequences of a whole model: of blocks, or of logits."""
        size = sequences // count
        tp = mesh["tp"]
        share = 1 / tp if config["sequence_parallel"] else 1 / 4 + 3 / (4 * tp)
        return max(size * schedule.kept(mesh["pp"], count) / mesh["pp"] * share, size / tp)

    fit = [count for count in possible if held(count) <= budget]
    many = [n for n in fit if mesh["pp"] == 1 or n >= 2 * mesh["pp"]]
    # The fewest that fit and fill the pipeline; memory before the pipeline; at the worst, singly.
    assert batch.num_microbatches == (min(many) if many else max(fit or possible))


@pytest.mark.parametrize(
    ("strategy", "processes", "config", "cut"),
    [
        # micro-batches of a replica, sequences of each
        # Without it a quarter of a block's values is not divided over tp: 8 would be 5 sequences.
        ("tp", 2, {"batch_size": 4, "sequence_parallel": False}, (2, 4)),
        ("pp", 2, {"batch_size": 1}, (2, 1)),  # there are no 4 sequences
        ("3d", 8, {"batch_size": 4}, (4, 4)),
    ],
)
def test_cuts_by_hand(strategy, processes, config, cut):
    batch = lay_out(processes, strategy=strategy, **config).batch
    assert (batch.num_microbatches, batch.micro_batch_size) == cut


def typed(text):
    """The settings that a refusal suggests, each a dictionary."""
    *pairs, last = text.partition("; set ")[2].split("; or ")
    assert pairs
    assert last == "both to auto"
    yield {"micro_batch_size": "auto", "num_microbatches": "auto"}
    for pair in pairs:
        yield {key: int(n) for key, n in (word.split("=") for word in pair.split())}


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_a_cut_that_cannot_be_is_refused_with_some_that_can(name, pp):
    mesh = {"pp": pp, "dp_replicate": 2, "dp_shard": 1, "tp": 1}
    numbers = ("auto", 1, 3, 5, 6, 100)
    refusals = 0
    for size, count in itertools.product(numbers, numbers):
        config = {"batch_size": 3, "micro_batch_size": size, "num_microbatches": count}
        try:
            batch, schedule = cut(mesh, name, **config)
        except UserError as error:
            refusals += 1
            for settings_ in typed(str(error)):
                cut(mesh, name, **{**config, **settings_})
        else:
            assert size in ("auto", batch.micro_batch_size)
            assert count in ("auto", batch.num_microbatches)
            assert schedule.takes(pp, batch.num_microbatches)
            assert batch.micro_batch_size * batch.num_microbatches * 2 == batch.global_batch_size
    assert refusals
