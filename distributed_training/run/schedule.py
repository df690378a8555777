"""The learning rate of each step."""

from __future__ import annotations

import math

from distributed_training.settings.config import RunConfig


def learning_rate(config: RunConfig, step: int, num_steps: int) -> float:
    """Rate of step `step` (0-based) of `num_steps`: linear warm-up, then the schedule."""
    peak, warmup = float(config.learning_rate), config.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * {"constant": 1.0, "linear": 1.0 - progress, "cosine": cosine}[config.lr_schedule]
