"""Train in one process, as a reference for the runtime, and compare the pipeline's gradient of each
microbatch with the exact gradient.

A microbatch's forward pass may use different versions of the weights on different stages. This
mixed set of weights is also a model, and autograd through all stages computes its exact gradient. A
backward pass with the weights of the forward pass computes this gradient. With newer weights, the
result of the backward pass is not the gradient of any model.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipedream.schedules.ops import Op, Schedule, find_input_ops
from pipedream.schedules.orders import schedule_for_training
from pipedream.simulate.simulator import build_costs, simulate
from pipedream.train.models import TASK_MICROBATCHES, Task, Workload
from pipedream.train.trainer import Gradients, StageTrainer, Trainers, Weights, build_trainers


def run_schedule(schedule: Schedule, trainers: Trainers, task: Task) -> None:
    """Run every operation once, in the sequence that the simulator's clock gives for equal
    durations. Any other sequence that the ranks' orders and the data allow gives the same result,
    because a stage always runs its operations in its rank's order."""
    source = find_input_ops(schedule)
    unused_results: dict[Op | None, Tensor | None] = {}  # operation -> result that is not used yet
    for op in simulate(schedule, build_costs(schedule)).times:
        unused_results[op] = trainers[op.stage].run(
            op, unused_results.pop(source.get(op), None), task
        )


class TrainResult(NamedTuple):
    """Result of training under one schedule."""

    losses: list[float]  # mean loss of each batch, in nats
    weights: list[Weights]  # the last version of every stage
    peak_versions: list[int]  # maximum number of versions that each stage kept

    @property
    def diverged(self) -> bool:
        """True if a loss is not finite, or if the last loss is higher than the first."""
        return not all(map(math.isfinite, self.losses)) or self.losses[-1] > self.losses[0]


def train(
    name: str,
    *,
    num_microbatches: int,
    num_batches: int,
    trainer_class: type[StageTrainer] = StageTrainer,
    **config: Any,
) -> TrainResult:
    """Train for `num_batches` batches under a schedule from SCHEDULES. `config` has the keys that
    Workload reads."""
    m = num_microbatches
    schedule, policy = schedule_for_training(name, config["num_stages"], m, num_batches)
    workload = Workload(config)
    trainers = build_trainers(workload, schedule, policy, m, trainer_class=trainer_class)
    run_schedule(schedule, trainers, workload.task)
    losses = [float(trainers[max(trainers)].losses[i]) for i in range(m * num_batches)]
    return TrainResult(
        losses=[sum(losses[first : first + m]) / m for first in range(0, len(losses), m)],
        weights=[trainer.weights for trainer in trainers.values()],
        peak_versions=[trainer.peak_versions for trainer in trainers.values()],
    )


def final_loss(result: TrainResult, num_microbatches: int) -> float:
    """Return the mean loss over the last batches, which together contain every sample about once.
    If there are too few batches, average over all of them. The noise of a single step would hide
    the differences between schedules."""
    batches = math.ceil(TASK_MICROBATCHES / num_microbatches)
    return statistics.fmean(result.losses[-batches:])


class MicrobatchError(NamedTuple):
    """Relative error of one microbatch's gradient: the norm of its difference from the exact
    gradient, divided by the norm of the exact gradient. An error of exactly 0 means that the two
    gradients are bitwise equal. The error is infinite if training has diverged."""

    microbatch: int
    relative_error: float  # over all stages, against the gradient at the forward pass's weights
    per_stage: tuple[float, ...]
    staleness_error: float  # against the gradient at the newest weights, which are updated


def copy_weights(weights: Weights) -> Weights:
    return {name: weight.detach().clone() for name, weight in weights.items()}


def train_and_check(
    name: str, *, every: int = 1, **settings: Any
) -> tuple[TrainResult, list[MicrobatchError]]:
    """Train, and check the gradient of one in `every` microbatches. Return the training result and
    the gradient errors, in the order in which the backward passes end."""
    workload = Workload(settings)
    modules: dict[int, nn.Module] = {}  # by stage
    forward_weights: dict[tuple[int, int], Weights] = {}  # by microbatch and stage
    collected: dict[int, dict[int, tuple[Weights, Gradients, Weights]]] = defaultdict(dict)
    errors = []

    class Recorder(StageTrainer):
        """Trainer that copies the weights of each pass, because in-place updates overwrite
        them."""

        def forward(self, microbatch: int, x: Tensor, target: Tensor) -> Tensor:
            out = super().forward(microbatch, x, target)
            modules[self.stage] = self.module
            if microbatch % every == 0:
                forward_weights[microbatch, self.stage] = copy_weights(
                    self.in_flight[microbatch].weights
                )
            return out

        def weight_gradient(self, microbatch: int) -> Gradients:
            newest = copy_weights(self.weights)
            gradients = super().weight_gradient(microbatch)
            if microbatch % every == 0:
                old_weights = forward_weights.pop((microbatch, self.stage))
                collected[microbatch][self.stage] = old_weights, gradients, newest
                if len(collected[microbatch]) == self.num_stages:
                    errors.append(gradient_error(microbatch))
            return gradients

    def exact_gradients(microbatch: int, weights: Iterable[Weights]) -> list[list[Tensor]]:
        """Return the gradients that autograd computes for the whole model in one backward pass,
        with the given weights."""
        leaves = [
            {n: w.requires_grad_() for n, w in stage_weights.items()} for stage_weights in weights
        ]
        x, target = workload.task.microbatch(microbatch)
        for stage, stage_weights in enumerate(leaves):
            x = torch.func.functional_call(modules[stage], stage_weights, (x,), tie_weights=False)
        loss = workload.loss(x, target) / settings["num_microbatches"]
        gradients = iter(
            torch.autograd.grad(
                loss, [w for stage_weights in leaves for w in stage_weights.values()]
            )
        )
        return [[next(gradients) for _ in stage_weights] for stage_weights in leaves]

    def gradient_error(i: int) -> MicrobatchError:
        collected_by_stage = collected.pop(i)
        old_weights, computed, newest = zip(
            *(collected_by_stage[s] for s in sorted(collected_by_stage)), strict=True
        )
        exact = exact_gradients(i, old_weights)
        error = relative_difference(chain(*computed), chain(*exact))
        by_stage = tuple(map(relative_difference, computed, exact))
        stale = relative_difference(chain(*computed), chain(*exact_gradients(i, newest)))
        return MicrobatchError(i, error, by_stage, stale)

    return train(name, **settings, trainer_class=Recorder), errors


@torch.no_grad()
def relative_difference(computed: Iterable[Tensor], exact: Iterable[Tensor]) -> float:
    """Return the norm of `computed - exact`, divided by the norm of `exact`. Return infinity if the
    quotient is not finite."""
    pairs = list(zip(computed, exact, strict=True))
    squared_error = math.fsum(float((a - b).square().sum()) for a, b in pairs)
    norm = math.fsum(float(b.square().sum()) for _, b in pairs)
    error = math.sqrt(squared_error / norm) if norm > 0 else math.nan
    return error if math.isfinite(error) else math.inf
