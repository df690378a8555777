"""The runtime's training done by the one-process oracle, and whether the weights are the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pipedream.ops import Schedule
from pipedream.oracle import run_schedule
from pipedream.policies import Policy
from pipedream.trainer import StageTrainer, Weights
from pipedream.workload import build_workload


def train_alone(
    config: Mapping[str, Any], schedule: Schedule, policy: Policy, m: int, device: torch.device
) -> list[Weights]:
    """The final weights of every stage, on the CPU. `m`: microbatches in a batch."""
    workload = build_workload(config, device)
    last = len(workload.modules) - 1
    trainers = [
        StageTrainer(
            module,
            policy,
            stage=stage,
            num_stages=last + 1,
            batch_size=m,
            num_microbatches=m * config["num_batches"],
            learning_rate=config["learning_rate"],
            loss=workload.loss if stage == last else None,
        )
        for stage, module in enumerate(workload.modules)
    ]
    run_schedule(schedule, trainers, workload.task)
    return [on_cpu(trainer.weights) for trainer in trainers]


def on_cpu(weights: Weights) -> Weights:
    return {name: tensor.detach().cpu() for name, tensor in weights.items()}


def equal_bits(ours: list[Weights], theirs: list[Weights]) -> bool:
    """Whether all stages' weights are the same bits."""
    return all(
        a.keys() == b.keys() and all(_same_bits(a[name], b[name]) for name in a)
        for a, b in zip(ours, theirs, strict=True)
    )


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """torch.equal would take what has diverged to NaN on both sides as different."""
    a, b = (tensor.flatten().view(torch.uint8) for tensor in (a, b))
    return torch.equal(a, b)
