"""Further places for metrics, imported only when CONFIG asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol


class Tracker(Protocol):
    """Receives numbers by step."""

    def log(self, values: dict[str, Any], step: int) -> None:
        """Record the numeric entries of `values` at `step`."""
        ...

    def close(self) -> None:
        """Write everything out."""
        ...


class NoTracker:
    """For `log_to` None and for ranks other than 0."""

    def log(self, values: dict[str, Any], step: int) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing to close."""


class TensorBoardTracker:
    """Event files below the run's folder; look with `tensorboard --logdir runs`."""

    def __init__(self, run_dir: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"))

    def log(self, values: dict[str, Any], step: int) -> None:
        for name, value in _numbers(values).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """Weights & Biases; its own settings and WANDB_MODE=offline apply."""

    def __init__(self, run_dir: Path, config: dict[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project="distributed-training", name=run_dir.name, dir=str(run_dir), config=config
        )

    def log(self, values: dict[str, Any], step: int) -> None:
        self._run.log(_numbers(values), step=step)

    def close(self) -> None:
        self._run.finish()


def build_tracker(log_to: str | None, run_dir: Path, config: dict[str, Any]) -> Tracker:
    """The tracker that `log_to` names; None gives one that keeps nothing."""
    if log_to == "tensorboard":
        return TensorBoardTracker(run_dir)
    if log_to == "wandb":
        return WandbTracker(run_dir, config)
    return NoTracker()


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if isinstance(value, (int, float))}
