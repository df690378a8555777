"""Losses and gradients that are not finite: how a step is found to be so, and who is named."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from distributed_training.engines.base import StepResult
from distributed_training.parallel.agree import gather
from distributed_training.settings.config import RunConfig
from distributed_training.settings.errors import RunError

SKIPS_IN_A_ROW = 10  # with on_nonfinite=skip; where more follow, no single batch is at fault


class NonFiniteError(RunError):
    """A step whose loss or gradients are not finite."""

    def __init__(self, step: int, what: str, fix: str) -> None:
        super().__init__(what, fix=fix)
        self.step, self.what = step, what


def has_fault(result: StepResult, config: RunConfig) -> bool:
    """Whether this rank's gradients are not finite. Overflow of fp16, after which the loss scale
    falls, is none; DeepSpeed gives -1 for such a norm, and with bf16 leaves the update out."""
    if result.skipped:
        return config.precision != "fp16"
    return result.grad_norm is not None and not 0 <= float(result.grad_norm) < math.inf


def describe(step: int, own_loss: float, result: StepResult, names: Sequence[str]) -> str:
    """The step, the ranks whose own summed loss is not finite, and the first gradient in the
    model's order that is not, with the ranks that hold it. Collective."""
    name = None
    if result.gradients is not None:
        bad = result.gradients.isfinite().logical_not().nonzero()
        name = names[int(bad[0])] if len(bad) else None
    ranks = gather((math.isfinite(own_loss), name))
    losses = [rank for rank, (finite, _) in enumerate(ranks) if not finite]
    found = next((name for _, name in ranks if name is not None), None)
    said = [f"the loss is not finite on {_ranks(losses)}"] if losses else []
    if found is not None:
        holders = [rank for rank, (_, name) in enumerate(ranks) if name == found]
        said.append(f"the first gradient that is not finite is of {found} on {_ranks(holders)}")
    return f"step {step}: {' and '.join(said) or 'the gradients are not finite'}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def advise(saved: Sequence[Path]) -> str:
    """What to type where the run had saved these checkpoints."""
    if not saved:
        return "nothing was saved before; lower learning_rate, or look for a bad sample"
    fix = f"{saved[-1].name} is whole; to pass the batch over, go on from there with"
    return f"{fix} --resume auto --on_nonfinite rollback"
