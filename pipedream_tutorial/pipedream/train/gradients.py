"""Each microbatch's gradient as the pipeline computed it, against the exact one.

A microbatch's forward pass may use other versions of the weights on other stages. That mixed set
of weights is a model like any other, and has an exact gradient: plain autograd through all stages
at once. A backward pass that sees the forward pass's weights computes it; one that sees newer
weights computes the gradient of no model at all.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from pipedream.schedules.ops import Op
from pipedream.train.models import build_task
from pipedream.train.oracle import Trainers, TrainResult, train
from pipedream.train.trainer import Gradients, StageTrainer, Weights


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchError:
    """How far one microbatch's gradient is off: norm of the difference by norm of the exact one.

    Exactly 0: not a bit differs. Infinite where training has diverged and there is no number.
    """

    microbatch: int
    relative_error: float
    """Over all parameters of all stages, against the gradient at the forward passes' weights."""
    per_stage: tuple[float, ...]
    staleness_error: float
    """Over all parameters, against the gradient at the weights that it is applied to: each stage's
    newest before this update."""


class _RecordingTrainer(StageTrainer):
    """Keeps what the newest backward pass gave, and the weights before its update."""

    newest: tuple[Gradients, Weights]

    def _accumulate(self, gradients: Gradients) -> None:
        self.newest = gradients, copied(self.weights)
        super()._accumulate(gradients)


def copied(weights: Weights) -> Weights:
    return {name: weight.detach().clone() for name, weight in weights.items()}


def train_and_check(
    name: str, *, every: int = 1, **settings: Any
) -> tuple[TrainResult, list[MicrobatchError]]:
    """oracle.train with these settings, and how far every `every`-th microbatch's gradient is off,
    in the order in which their backward passes end."""
    task = build_task(seed=settings["seed"])
    used: dict[int, dict[int, Weights]] = defaultdict(dict)
    given: dict[int, dict[int, tuple[Gradients, Weights]]] = defaultdict(dict)
    errors = []

    def watch(op: Op, trainers: Trainers) -> None:
        kind, stage, i = op
        trainer = trainers[stage]
        assert isinstance(trainer, _RecordingTrainer)
        if i % every or kind == "I":
            return
        if kind == "F":
            used[i][stage] = copied(trainer.in_flight[i].weights)
            return
        given[i][stage] = trainer.newest
        if len(given[i]) < len(trainers):
            return

        def exact_at(weights: Iterable[Weights]) -> list[list[torch.Tensor]]:
            """By autograd through all stages at once, each with the weights given."""
            leaves = [{n: w.requires_grad_() for n, w in own.items()} for own in weights]
            x, target = task.microbatch(i)
            for one, own in zip(trainers.values(), leaves, strict=True):
                x = torch.func.functional_call(one.module, own, (x,), tie_weights=False)
            loss = cross_entropy(x, target) / settings["num_microbatches"]
            found = iter(torch.autograd.grad(loss, [w for own in leaves for w in own.values()]))
            return [[next(found) for _ in own] for own in leaves]

        computed, newest = zip(*(given[i][s] for s in trainers), strict=True)
        exact = exact_at(used[i][s] for s in trainers)
        error = MicrobatchError(
            microbatch=i,
            relative_error=relative_difference(chain(*computed), chain(*exact)),
            per_stage=tuple(map(relative_difference, computed, exact)),
            staleness_error=relative_difference(chain(*computed), chain(*exact_at(newest))),
        )
        errors.append(error)
        del used[i], given[i]

    return train(name, **settings, watch=watch, trainer_class=_RecordingTrainer), errors


@torch.no_grad()
def relative_difference(found: Iterable[torch.Tensor], exact: Iterable[torch.Tensor]) -> float:
    """Norm of the difference by the norm of `exact`; infinite where that is no number."""
    pairs = list(zip(found, exact, strict=True))
    off = math.fsum(float((a - b).square().sum()) for a, b in pairs)
    norm = math.fsum(float(b.square().sum()) for _, b in pairs)
    error = math.sqrt(off / norm) if norm > 0 else math.nan
    return error if math.isfinite(error) else math.inf
