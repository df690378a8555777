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

import torch
from torch import nn

from pipedream.schedules.ops import FORWARD, INPUT_GRADIENT, Op
from pipedream.train.models import Task, build_task
from pipedream.train.oracle import TrainResult, Watcher, train
from pipedream.train.trainer import StageTrainer, Weights

Gradients = list[list[torch.Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchGradients:
    """One microbatch's gradients, by stage and then in the order of the stage's parameters."""

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
    name: str,
    see: Callable[[MicrobatchGradients], None],
    *,
    num_stages: int,
    num_microbatches: int,
    layers_per_stage: int,
    learning_rate: float,
    num_batches: int,
    seed: int,
    every: int = 1,
) -> TrainResult:
    """oracle.train, with `see` called for every `every`-th microbatch when all stages have run its
    backward pass."""
    return train(
        name,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        layers_per_stage=layers_per_stage,
        learning_rate=learning_rate,
        num_batches=num_batches,
        seed=seed,
        watch=_watcher(build_task(seed=seed), num_microbatches, see, every),
        trainer_class=_RecordingTrainer,
    )


def _watcher(
    task: Task, batch_size: int, see: Callable[[MicrobatchGradients], None], every: int
) -> Watcher:
    used: dict[int, dict[int, Weights]] = defaultdict(dict)
    newest: dict[int, dict[int, tuple[list[torch.Tensor], Weights]]] = defaultdict(dict)

    def watch(op: Op, trainers: list[StageTrainer]) -> None:
        kind, stage, i = op
        if i % every or kind == INPUT_GRADIENT:
            return
        if kind == FORWARD:
            used[i][stage] = _copied(trainers[stage].in_flight[i].weights)
            return
        trainer = trainers[stage]
        assert isinstance(trainer, _RecordingTrainer)
        newest[i][stage] = trainer.newest
        if len(newest[i]) < len(trainers):
            return
        forward, last = used.pop(i), newest.pop(i)
        stages = range(len(trainers))
        modules = [t.module for t in trainers]
        inputs, target = task.microbatch(i)

        def gradient(weights: list[Weights]) -> Gradients:
            return exact_gradient(modules, weights, inputs, target, batch_size)

        used_at, applied_to = [forward[s] for s in stages], [last[s][1] for s in stages]
        exact = gradient(used_at)
        see(
            MicrobatchGradients(
                microbatch=i,
                computed=[last[s][0] for s in stages],
                exact=exact,
                current=exact if _equal(used_at, applied_to) else gradient(applied_to),
            )
        )

    return watch


def _equal(ours: Sequence[Weights], theirs: Sequence[Weights]) -> bool:
    return all(
        torch.equal(a[name], b[name]) for a, b in zip(ours, theirs, strict=True) for name in a
    )


def errors_of(gradients: MicrobatchGradients) -> MicrobatchError:
    """Relative errors of one microbatch's gradients."""
    computed, exact, current = gradients.computed, gradients.exact, gradients.current
    by_stage = [_squares(a, b) for a, b in zip(computed, exact, strict=True)]
    error = _relative(list(chain(*by_stage)))
    return MicrobatchError(
        microbatch=gradients.microbatch,
        relative_error=error,
        per_stage=tuple(map(_relative, by_stage)),
        staleness_error=error
        if current is exact
        else relative_difference(list(chain(*computed)), list(chain(*current))),
    )


def relative_difference(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """Norm of the difference by the norm of `exact`, over all tensors; infinite where that is no
    number."""
    return _relative(_squares(found, exact))


def _squares(
    found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]
) -> list[tuple[float, float]]:
    """Of each tensor the squared norm of the difference, and that of what is exact."""
    return [
        (float((a - b).square().sum()), float(b.square().sum()))
        for a, b in zip(found, exact, strict=True)
    ]


def _relative(squares: Sequence[tuple[float, float]]) -> float:
    off, norm = (math.fsum(column) for column in zip(*squares, strict=True))
    error = math.sqrt(off / norm) if norm > 0 else math.nan
    return error if math.isfinite(error) else math.inf
