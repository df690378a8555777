"""State against published figures and sums by hand."""

from __future__ import annotations

import dataclasses

import pytest

from distributed_training.predict.memory import bytes_a_parameter
from tests.support import named_strategy

WHOLE = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "tp": 1}


def state(strategy, precision="bf16", **axes):
    """Bytes a parameter: of parameters, gradients, optimizer, host, disk."""
    return tuple(bytes_a_parameter(strategy, precision, {**WHOLE, **axes}).values())


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_papers_example(stage, gigabytes):
    """Figure 1 of the ZeRO paper: 7.5B parameters over 64 GPUs."""
    document = {"zero_optimization": {"stage": stage}}
    strategy = dataclasses.replace(named_strategy("zero1"), document=document)
    total = sum(state(strategy, dp_shard=64)) * 7.5
    assert total == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize(
    ("name", "precision", "parts"),
    [
        ("dp", "bf16", (4, 4, 8, 0, 0)),
        ("tp", "bf16", (4, 4, 8, 0, 0)),  # of the part that a process has
        ("fsdp", "bf16", (1, 1, 2, 0, 0)),
        ("zero1", "bf16", (2, 2, 3, 0, 0)),
        ("zero1", "fp32", (4, 4, 3, 0, 0)),
        ("zero2", "bf16", (2, 0.5, 3, 0, 0)),
        ("zero3", "bf16", (0.5, 0.5, 3, 0, 0)),
        ("offload", "bf16", (2, 0, 0, 3 + 1, 0)),
        ("infinity", "bf16", (0, 0, 0, 1, 3 + 0.5)),
    ],
)
def test_state_bytes_on_four_processes(name, precision, parts):
    axis = {"dp": "dp_replicate", "tp": "tp"}.get(name, "dp_shard")
    assert state(named_strategy(name), precision, **{axis: 4}) == parts


@pytest.mark.parametrize(
    ("precision", "axes", "parts"),
    [
        ("bf16", {"dp_shard": 4}, (1 + 2, 4, 2)),
        ("fp32", {"dp_shard": 4}, (1 + 4, 4, 2)),
        ("bf16", {}, (4 + 2, 4, 8)),
        ("fp32", {}, (4, 4, 8)),
        ("fp32", {"dp_replicate": 2}, (4 + 4, 4, 8)),
    ],
)
def test_state_bytes_of_a_stage_while_its_micro_batches_run(precision, axes, parts):
    """strategies/10_3d_parallel: 12 / S + 6 bytes a parameter in bf16."""
    assert state(named_strategy("3d"), precision, pp=2, **axes) == (*parts, 0, 0)
