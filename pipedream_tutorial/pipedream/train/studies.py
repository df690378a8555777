"""The same model trained under several schedules, and how far its gradients were off."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipedream.train.gradients import MicrobatchError, errors_of, watch_gradients
from pipedream.train.models import build_task
from pipedream.train.oracle import TrainResult

TRAINED = (
    "naive", "gpipe", "1f1b",
    "pipedream", "pipedream-no-stash", "pipedream-vertical", "pipedream-2bw",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRow:
    """One schedule's training."""

    name: str
    losses: list[float]
    """Mean loss of each batch, nats, at the weights of its forward passes."""
    final_loss: float
    """See final_loss()."""
    median_gradient_error: float
    """Relative, at the weights of the forward passes."""
    median_staleness_error: float
    """Relative, at the weights to which the gradient is applied."""
    peak_versions: list[int]
    """By stage."""
    diverged: bool


def compare_training(
    schedule_names: Sequence[str] = TRAINED, *, every: int = 3, **settings: Any
) -> list[TrainingRow]:
    """Train under each schedule with the settings of oracle.train; gradients are checked for every
    `every`-th microbatch.

    Raises UserError for a schedule that is simulated only or does not allow these sizes.
    """
    rows = []
    for name in schedule_names:
        result, errors = train_and_check(name, every=every, **settings)
        rows.append(
            TrainingRow(
                name=name,
                losses=result.losses,
                final_loss=final_loss(result, settings["num_microbatches"], settings["seed"]),
                median_gradient_error=statistics.median(e.relative_error for e in errors),
                median_staleness_error=statistics.median(e.staleness_error for e in errors),
                peak_versions=result.peak_versions,
                diverged=result.diverged,
            )
        )
    return rows


def train_and_check(name: str, **settings: Any) -> tuple[TrainResult, list[MicrobatchError]]:
    """oracle.train, and the gradients' errors by microbatch."""
    errors: list[MicrobatchError] = []
    result = watch_gradients(name, lambda found: errors.append(errors_of(found)), **settings)
    return result, errors


def final_loss(result: TrainResult, num_microbatches: int, seed: int) -> float:
    """Mean loss of the last batches that hold every sample about once (all batches, if fewer).

    Of the whole data and of many weights: one step's noise would hide what the schedules differ by.
    """
    task = build_task(seed=seed)
    batches = math.ceil(len(task.targets) / (task.microbatch_size * num_microbatches))
    return statistics.fmean(result.losses[-batches:])
