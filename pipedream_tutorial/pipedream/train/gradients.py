"""Each microbatch's gradient as the pipeline computed it, against the exact one.

A microbatch's forward pass may use other versions of the weights on other stages. That mixed set
of weights is a model like any other, and has an exact gradient: plain autograd through all stages
at once. A backward pass that sees the forward pass's weights computes it; one that sees newer
weights computes the gradient of no model at all.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from pipedream.schedules.ops import FORWARD, INPUT_GRADIENT, Op
from pipedream.train.models import build_task
from pipedream.train.oracle import Trainers, TrainResult, train
from pipedream.train.trainer import StageTrainer, Weights

Gradients = list[list[torch.Tensor]]
"""By stage, then in the order of the stage's parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchGradients:
    """One microbatch's gradients."""

    microbatch: int
    computed: Gradients
    """What the backward passes gave."""
    exact: Gradients
    """At the weights that the forward passes used."""
    current: Gradients
    """At the weights that the gradient is applied to: each stage's newest before this update."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchError:
    """How far one microbatch's gradient is off: norm of the difference by norm of the exact one.

    Infinite where training has diverged and there is no number.
    """

    microbatch: int
    relative_error: float
    """Over all parameters of all stages, against the gradient at the forward passes' weights."""
    per_stage: tuple[float, ...]
    staleness_error: float
    """Over all parameters, against the gradient at the current weights."""


class _RecordingTrainer(StageTrainer):
    """Keeps what the newest backward pass gave, and the weights before its update."""

    newest: tuple[list[torch.Tensor], Weights]

    def _accumulate(self, gradients: tuple[torch.Tensor, ...]) -> None:
        self.newest = list(gradients), _copied(self.weights)
        super()._accumulate(gradients)


def _copied(weights: Weights) -> Weights:
    return {name: weight.detach().clone() for name, weight in weights.items()}


def exact_gradient(
    modules: Sequence[nn.Module],
    weights: Sequence[Weights],
    inputs: torch.Tensor,
    target: torch.Tensor,
    batch_size: int,
) -> Gradients:
    """Autograd through all stages at once, each with the weights given; loss / batch_size.

    inputs: [samples, width]; target: [samples].
    """
    leaves = [{n: w.detach().requires_grad_() for n, w in own.items()} for own in weights]
    x = inputs
    for module, own in zip(modules, leaves, strict=True):
        x = torch.func.functional_call(module, own, (x,), tie_weights=False)
    loss = nn.functional.cross_entropy(x, target) / batch_size
    gradients = iter(torch.autograd.grad(loss, [w for own in leaves for w in own.values()]))
    return [[next(gradients) for _ in own] for own in leaves]


def watch_gradients(
    name: str, see: Callable[[MicrobatchGradients], None], *, every: int = 1, **settings: Any
) -> TrainResult:
    """oracle.train with these settings; `see` is called for every `every`-th microbatch when all
    stages have run its backward pass."""
    task = build_task(seed=settings["seed"])
    batch_size = settings["num_microbatches"]
    used: dict[int, dict[int, Weights]] = defaultdict(dict)
    newest: dict[int, dict[int, tuple[list[torch.Tensor], Weights]]] = defaultdict(dict)

    def watch(op: Op, trainers: Trainers) -> None:
        kind, stage, i = op
        if i % every or kind == INPUT_GRADIENT:
            return
        trainer = trainers[stage]
        if kind == FORWARD:
            used[i][stage] = _copied(trainer.in_flight[i].weights)
            return
        assert isinstance(trainer, _RecordingTrainer)
        newest[i][stage] = trainer.newest
        if len(newest[i]) < len(trainers):
            return
        last = [found for _, found in sorted(newest.pop(i).items())]
        used_at = [weights for _, weights in sorted(used.pop(i).items())]
        exact, current = (
            exact_gradient(
                [t.module for t in trainers.values()], weights, *task.microbatch(i), batch_size
            )
            for weights in (used_at, [weights for _, weights in last])
        )
        computed = [gradients for gradients, _ in last]
        see(MicrobatchGradients(microbatch=i, computed=computed, exact=exact, current=current))

    return train(name, **settings, watch=watch, trainer_class=_RecordingTrainer)


def train_and_check(name: str, **settings: Any) -> tuple[TrainResult, list[MicrobatchError]]:
    """oracle.train, and the gradients' errors by microbatch."""
    errors: list[MicrobatchError] = []
    result = watch_gradients(name, lambda found: errors.append(errors_of(found)), **settings)
    return result, errors


def errors_of(found: MicrobatchGradients) -> MicrobatchError:
    """Relative errors of one microbatch's gradients."""
    computed = list(chain(*found.computed))
    return MicrobatchError(
        microbatch=found.microbatch,
        relative_error=relative_difference(computed, list(chain(*found.exact))),
        per_stage=tuple(map(relative_difference, found.computed, found.exact)),
        staleness_error=relative_difference(computed, list(chain(*found.current))),
    )


def relative_difference(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """Norm of the difference by the norm of `exact`, over all tensors; infinite where that is no
    number."""
    pairs = list(zip(found, exact, strict=True))
    off = math.fsum(float((a - b).square().sum()) for a, b in pairs)
    norm = math.fsum(float(b.square().sum()) for _, b in pairs)
    error = math.sqrt(off / norm) if norm > 0 else math.nan
    return error if math.isfinite(error) else math.inf
