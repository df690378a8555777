"""What a run has done so far: summed over ranks, recorded, shown and tracked as it happens."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distributed_training.engines.base import StepResult
from distributed_training.records.display import Display
from distributed_training.records.record import RunRecord, append_metrics
from distributed_training.records.trackers import Tracker


@dataclass
class History:
    """The part of a record that grows while a run trains, and that a resumed run takes over."""

    step: int = 0
    """Optimizer steps done."""
    loss_curve: list[Any] = field(default_factory=list)
    """[step, mean loss]; None stands for what was not finite in a record that was read back."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    skipped_steps: list[int] = field(default_factory=list)

    def cut(self, step: int) -> None:
        """Forget what came after `step`."""
        self.step = step
        self.loss_curve = [row for row in self.loss_curve if row[0] <= step]
        self.evaluations = [row for row in self.evaluations if row["step"] <= step]
        self.epochs = [row for row in self.epochs if row["step"] <= step]
        self.skipped_steps = [skipped for skipped in self.skipped_steps if skipped <= step]


@dataclass
class Journal:
    """Keeps the history, the same on every rank; rank 0 also writes, shows and tracks it."""

    run_dir: Path
    num_steps: int
    display: Display
    history: History
    record: RunRecord | None = None
    """On rank 0 only."""
    tracker: Tracker = field(default_factory=Tracker)
    _pending: list[tuple[dict[str, Any], StepResult]] = field(default_factory=list)

    def write(self) -> None:
        """Bring the record up to date."""
        if self.record is not None:
            self.record.update(**vars(self.history))

    def add_step(self, result: StepResult, **values: Any) -> None:
        """One more step; its loss stays on the device until `flush`."""
        self.history.step += 1
        if result.skipped:
            self.history.skipped_steps.append(self.history.step)
        self._pending.append(({"step": self.history.step, **values}, result))

    def flush(self, durations_s: list[float]) -> None:
        """Sum pending losses over ranks; write, show and track them. Collective.

        `durations_s` ends with those of the pending steps.
        """
        pending, self._pending = self._pending, []
        if not pending:
            return
        sums = torch.stack([result.loss_sum for _, result in pending]).double().cpu()
        dist.all_reduce(sums)
        durations_s = durations_s[-len(pending) :]
        rows = [
            {
                **row,
                "num_targets": result.num_targets,
                "skipped": result.skipped,
                "loss": loss_sum / result.num_targets,
                "grad_norm": None if result.grad_norm is None else float(result.grad_norm),
                "step_time_s": seconds,
                "tokens_per_s": result.num_targets / seconds,
            }
            for (row, result), loss_sum, seconds in zip(
                pending, sums.tolist(), durations_s, strict=True
            )
        ]
        self.history.loss_curve += [[row["step"], row["loss"]] for row in rows]
        if self.record is not None:
            append_metrics(self.run_dir, rows)
        for row in rows:
            self.tracker.log(row, row["step"])
        self.display.progress(
            self.history.step,
            loss=rows[-1]["loss"],
            tokens_per_s=sum(row["num_targets"] for row in rows) / sum(durations_s),
            step_time_s=sum(durations_s) / len(rows),
        )

    def add_evaluation(self, loss: float, num_targets: int) -> None:
        """The validation loss after the steps done so far."""
        step, perplexity = self.history.step, math.exp(min(loss, 700.0))
        row = {"step": step, "loss": loss, "perplexity": perplexity, "num_targets": num_targets}
        self.history.evaluations.append(row)
        self.say(f"validation loss {loss:.4f}  perplexity {perplexity:.2f}")
        self.tracker.log({"validation_loss": loss}, step)

    def end_epoch(self, steps_per_epoch: int) -> None:
        """The epoch of the last step is over and has been evaluated."""
        history = self.history
        epoch = (history.step - 1) // steps_per_epoch
        own = [x for step, x in history.loss_curve if step > epoch * steps_per_epoch]
        losses = [loss for loss in own if loss is not None]
        history.epochs.append(
            {
                "epoch": epoch + 1,
                "step": history.step,
                "mean_step_loss": sum(losses) / len(losses) if losses else None,
                "validation_loss": history.evaluations[-1]["loss"],
                "validation_perplexity": history.evaluations[-1]["perplexity"],
            }
        )
        self.write()

    def say(self, text: str) -> None:
        """Print a line about the step that has been reached."""
        self.display.say(f"step {self.history.step:>6}/{self.num_steps}  {text}")
