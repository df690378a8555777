"""Trains under a schedule in one process: the result that the real runtime has to reproduce."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipedream.schedules.catalogue import layers_of_a_stage, schedule_for_training
from pipedream.schedules.ops import BACKWARD, FORWARD, WEIGHT_GRADIENT, Op, Schedule
from pipedream.schedules.policies import Policy
from pipedream.simulate.simulator import build_costs, simulate
from pipedream.train.models import TASK_MICROBATCHES, Task, build_stages, build_task
from pipedream.train.trainer import StageTrainer, Weights

Watcher = Callable[[Op, list[StageTrainer]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """What training under one schedule came to."""

    losses: list[float]
    """Mean loss of each batch, nats."""
    weights: list[Weights]
    """The last version of every stage."""
    peak_versions: list[int]
    """Most versions that each stage kept at a time."""

    @property
    def diverged(self) -> bool:
        """Whether a loss is no number, or the last one is above the first."""
        return not all(map(math.isfinite, self.losses)) or self.losses[-1] > self.losses[0]


def build_trainers(
    stages: list[nn.Module],
    policy: Policy,
    *,
    trainer_class: type[StageTrainer] = StageTrainer,
    **settings: Any,
) -> list[StageTrainer]:
    """One trainer a stage, with the same settings."""
    return [
        trainer_class(module, policy, stage=stage, num_stages=len(stages), **settings)
        for stage, module in enumerate(stages)
    ]


def run_schedule(
    schedule: Schedule, trainers: list[StageTrainer], task: Task, watch: Watcher | None = None
) -> None:
    """Run every operation once, by the simulator's clock, all operations equally long.

    `watch` is called after each. Which of the orders that ranks' orders and data allow it is cannot
    matter: a stage sees its own operations in its rank's order, whatever the others do meanwhile.
    """
    given: dict[Op, torch.Tensor | None] = {}  # operation -> what it gave; B stands for I, too
    timeline = simulate(schedule, build_costs(schedule))
    for op in (op for event in timeline.all_events() for op in event.item.parts):
        kind, stage, i = op
        source = Op(FORWARD, stage - 1, i) if kind == FORWARD else Op(BACKWARD, stage + 1, i)
        result = trainers[stage].run(op, given.pop(source, None), task)
        if kind != WEIGHT_GRADIENT:
            given[op._replace(kind=FORWARD if kind == FORWARD else BACKWARD)] = result
        if watch is not None:
            watch(op, trainers)


def train(
    name: str,
    *,
    num_stages: int,
    num_microbatches: int,
    layers_per_stage: int,
    learning_rate: float,
    num_batches: int,
    seed: int,
    watch: Watcher | None = None,
    trainer_class: type[StageTrainer] = StageTrainer,
) -> TrainResult:
    """Train the small model under a schedule of SCHEDULES for `num_batches` batches.

    `num_stages` counts ranks; a rank's `layers_per_stage` are cut into the stages that it holds.
    """
    schedule, policy = schedule_for_training(name, num_stages, num_microbatches, num_batches)
    layers = layers_of_a_stage(layers_per_stage, schedule.stages_per_rank)
    trainers = build_trainers(
        build_stages(len(schedule.chains[0]), layers, seed=seed),
        policy,
        batch_size=num_microbatches,
        num_microbatches=num_microbatches * num_batches,
        learning_rate=learning_rate,
        cut=schedule.cuts_backward,
        trainer_class=trainer_class,
    )
    run_schedule(schedule, trainers, build_task(seed=seed), watch)
    return TrainResult(
        losses=batch_losses(trainers[-1].losses, num_microbatches, num_batches),
        weights=[trainer.weights for trainer in trainers],
        peak_versions=[trainer.peak_versions for trainer in trainers],
    )


def batch_losses(losses: Mapping[int, Any], m: int, num_batches: int) -> list[float]:
    """Mean loss of each batch of m microbatches, from those of the microbatches."""
    return [
        sum(float(losses[i]) for i in range(b * m, (b + 1) * m)) / m for b in range(num_batches)
    ]


def final_loss(result: TrainResult, num_microbatches: int) -> float:
    """Mean loss of the last batches that hold every sample about once (all batches, if fewer).

    Of the whole data and of many weights: one step's noise would hide what the schedules differ by.
    """
    batches = math.ceil(TASK_MICROBATCHES / num_microbatches)
    return statistics.fmean(result.losses[-batches:])
