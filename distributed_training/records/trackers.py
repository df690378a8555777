"""Further places for metrics, imported only when CONFIG asks for them. No torch at import."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Tracker:
    """Receives numbers by step; without `send`, keeps nothing."""

    send: Callable[[dict[str, float], int], None] = lambda values, step: None
    close: Callable[[], None] = lambda: None

    def log(self, values: dict[str, Any], step: int) -> None:
        """Record the numeric entries of `values` at `step`."""
        self.send({k: float(v) for k, v in values.items() if isinstance(v, (int, float))}, step)


def build_tracker(log_to: str | None, run_dir: Path, config: dict[str, Any]) -> Tracker:
    """The tracker that `log_to` names; None gives one that keeps nothing."""
    if log_to == "tensorboard":  # look with `tensorboard --logdir runs`
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(run_dir / "tensorboard"))

        def send(values: dict[str, float], step: int) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        return Tracker(send, writer.close)
    if log_to == "wandb":  # its own settings and WANDB_MODE=offline apply
        import wandb

        about = {"project": "distributed-training", "name": run_dir.name, "dir": str(run_dir)}
        run = wandb.init(**about, config=config)
        return Tracker(lambda values, step: run.log(values, step=step), run.finish)
    return Tracker()
