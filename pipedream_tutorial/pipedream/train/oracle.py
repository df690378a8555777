"""Trains under a schedule in one process: the result that the real runtime has to reproduce."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pipedream.schedules.catalogue import layers_of_a_stage, schedule_for_training
from pipedream.schedules.ops import Op, Schedule
from pipedream.simulate.simulator import build_costs, simulate
from pipedream.simulate.trace import handed_on
from pipedream.train.models import TASK_MICROBATCHES, Task, build_stages, build_task
from pipedream.train.trainer import StageTrainer, Weights

Trainers = Sequence[StageTrainer]
"""By stage."""
Watcher = Callable[[Op, Trainers], None]


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


def run_schedule(
    schedule: Schedule, trainers: Trainers, task: Task, watch: Watcher | None = None
) -> None:
    """Run every operation once, by the simulator's clock, all operations equally long.

    `watch` is called after each. Which of the orders that ranks' orders and data allow it is cannot
    matter: a stage sees its own operations in its rank's order, whatever the others do meanwhile.
    """
    source: dict[Op, Op] = {taker: giver for giver, taker in handed_on(schedule)}
    given: dict[Op | None, torch.Tensor | None] = {}  # operation -> its result, until it is taken
    timeline = simulate(schedule, build_costs(schedule))
    for op in (op for event in timeline.all_events() for op in event.item.parts):
        given[op] = trainers[op.stage].run(op, given.pop(source.get(op), None), task)
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
    m = num_microbatches
    schedule, policy = schedule_for_training(name, num_stages, m, num_batches)
    layers = layers_of_a_stage(layers_per_stage, schedule.stages_per_rank)
    modules = build_stages(len(schedule.chains[0]), layers, seed=seed)
    trainers = [
        trainer_class(
            module, schedule, policy, stage=stage, batch_size=m, learning_rate=learning_rate
        )
        for stage, module in enumerate(modules)
    ]
    run_schedule(schedule, trainers, build_task(seed=seed), watch)
    losses = [float(trainers[-1].losses[i]) for i in range(m * num_batches)]
    return TrainResult(
        losses=[sum(losses[first : first + m]) / m for first in range(0, len(losses), m)],
        weights=[trainer.weights for trainer in trainers],
        peak_versions=[trainer.peak_versions for trainer in trainers],
    )


def final_loss(result: TrainResult, num_microbatches: int) -> float:
    """Mean loss of the last batches that hold every sample about once (all batches, if fewer).

    Of the whole data and of many weights: one step's noise would hide what the schedules differ by.
    """
    batches = math.ceil(TASK_MICROBATCHES / num_microbatches)
    return statistics.fmean(result.losses[-batches:])
