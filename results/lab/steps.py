"""Run and time single training steps."""

import time
from typing import Any

import torch

from results.lab.harness import Run


def synchronize() -> None:
    """Wait for the GPU, if one is available."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def time_step(run: Run, batch: Any) -> tuple[float, float]:
    """Run one optimizer step. Return its duration in seconds and its mean loss per target token."""
    synchronize()
    began = time.perf_counter()
    result = run.engine.train_step(batch)
    synchronize()
    seconds = time.perf_counter() - began
    return seconds, float(result.loss_sum) / batch.num_targets
