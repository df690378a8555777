"""Test how a step's sequences are split into micro-batches, and which splits a user may request."""

import itertools
import re

import pytest

from distributed_training.plan.schedules import SCHEDULES
from distributed_training.planner.layouts import split_batch
from distributed_training.settings.errors import UserError
from tests.planner.helpers import candidate, lay_out


def cut(mesh, name, **config):
    """Return the batch, and the schedule for which it was split."""
    requested = candidate(mesh=mesh, strategy="3d", pipeline_schedule=name, **config)
    return split_batch(requested), requested.schedule


@pytest.mark.parametrize(
    ("strategy", "processes", "config", "cut"),
    [
        # cut: (micro-batches per replica, sequences per micro-batch)
        ("dp", 4, {"batch_size": 3, "grad_accum_steps": 5}, (5, 3)),
        ("tp", 4, {"batch_size": 4}, (1, 16)),
        ("pp", 2, {"batch_size": 1}, (2, 1)),  # fewer than 4 sequences are available
        ("pp", 4, {"batch_size": 4}, (8, 2)),  # at least 2 x pp
        ("pp", 2, {"batch_size": 3}, (6, 1)),  # 4 and 5 do not divide 6
        # Under GPipe, the first process keeps the activations of half of the blocks for all 16
        # sequences, even with one sequence per micro-batch.
        ("pp", 2, {"batch_size": 1, "grad_accum_steps": 8, "pipeline_schedule": "gpipe"}, (16, 1)),
        ("3d", 8, {"batch_size": 4}, (4, 4)),
    ],
)
def test_micro_batches_match_hand_calculations(strategy, processes, config, cut):
    batch = lay_out(processes, strategy=strategy, **config).batch
    assert (
        batch.global_batch_size
        == config["batch_size"] * config.get("grad_accum_steps", 1) * processes
    )
    assert (batch.num_microbatches, batch.micro_batch_size) == cut


def possible_settings(text):
    """Yield settings that use each number of micro-batches in an error message."""
    yield {"micro_batch_size": "auto", "num_microbatches": "auto"}
    for count in re.search(r"one of ([\d, ]+\d),", text)[1].split(", "):
        yield {"micro_batch_size": "auto", "num_microbatches": int(count)}


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_impossible_micro_batches_are_refused_with_possible_ones(name, pp):
    mesh = {"pp": pp, "dp_replicate": 2, "dp_shard": 1, "tp": 1}
    numbers = ("auto", 1, 3, 5, 6, 100)
    refusals = 0
    for size, count in itertools.product(numbers, numbers):
        config = {"batch_size": 3, "micro_batch_size": size, "num_microbatches": count}
        try:
            batch, schedule = cut(mesh, name, **config)
        except UserError as error:
            refusals += 1
            for settings in possible_settings(str(error)):
                cut(mesh, name, **{**config, **settings})
        else:
            assert size in ("auto", batch.micro_batch_size)
            assert count in ("auto", batch.num_microbatches)
            assert schedule.accepts(pp, batch.num_microbatches)
            assert batch.micro_batch_size * batch.num_microbatches * 2 == batch.global_batch_size
    assert refusals
