"""What a run has done so far: on every rank, in its record, and what a resumed run takes over."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class History:
    """The part of a record that grows while a run trains, and that a resumed run takes over."""

    step: int = 0  # optimizer steps done
    # [step, mean loss]; None stands for what was not finite in a record that was read back
    loss_curve: list[Any] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    skipped_steps: list[int] = field(default_factory=list)
    saves: list[dict[str, Any]] = field(default_factory=list)  # with this rank's own seconds
    loads: list[dict[str, Any]] = field(default_factory=list)  # likewise
    best: dict[str, Any] | None = None  # the evaluation whose weights keep_best has kept
    sample_before: str | None = None  # text of the untrained model

    def go_on(self, step: int, *, load_s: float) -> None:
        """From a checkpoint of `step`, which was read in `load_s` seconds."""
        self.cut(step)
        self.loads.append({"step": step, "load_s": load_s})

    def cut(self, step: int) -> None:
        """Forget what came after `step`."""
        self.step = step
        self.loss_curve = [row for row in self.loss_curve if row[0] <= step]
        for rows in (self.evaluations, self.epochs, self.saves, self.loads):
            rows[:] = [row for row in rows if row["step"] <= step]
        self.skipped_steps = [skipped for skipped in self.skipped_steps if skipped <= step]
        if self.best and self.best["step"] > step:  # the steps after this one find it again
            self.best = None
