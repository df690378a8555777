"""Further places for metrics, imported only when CONFIG asks for them. No torch at import."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Tracker:
    """Receives numbers by step; without `send`, keeps nothing."""

    send: Callable[[str, float, int], None] = lambda name, value, step: None
    close: Callable[[], None] = lambda: None

    def log(self, values: dict[str, Any], step: int) -> None:
        """Record the numeric entries of `values` at `step`."""
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self.send(name, float(value), step)


def build_tracker(log_to: str | None, run_dir: Path, config: dict[str, Any]) -> Tracker:
    """The tracker that `log_to` names; None gives one that keeps nothing."""
    if log_to == "tensorboard":  # look with `tensorboard --logdir runs`
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(run_dir / "tensorboard"))
        return Tracker(writer.add_scalar, writer.close)
    if log_to == "wandb":  # its own settings and WANDB_MODE=offline apply
        import wandb

        about = {"project": "distributed-training", "name": run_dir.name, "dir": str(run_dir)}
        run = wandb.init(**about, config=config)
        return Tracker(lambda name, value, step: run.log({name: value}, step=step), run.finish)
    return Tracker()
