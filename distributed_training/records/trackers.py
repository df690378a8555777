"""The metrics of a run, sent to a program that draws them; CONFIG's `log_to` names it."""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed_training.records.display import GIB
from distributed_training.records.record import Record

PROJECT = "distributed-training"


@dataclass(frozen=True)
class Tracker:
    """Receives numbers by step, and at the end those that sum the run up; this one drops them."""

    send: Callable[..., object] = lambda values, step=None: None  # no step: of the whole run
    end: Callable[[], object] = lambda: None

    def log_step(self, row: dict[str, Any]) -> None:
        """A row of metrics.jsonl."""
        values = {f"train/{name}": row[name] for name in ("loss", "learning_rate", "grad_norm")}
        values["train/perplexity"] = perplexity(row["loss"])
        values |= {f"speed/{name}": row[name] for name in ("tokens_per_s", "step_time_s")}
        self.send({name: x for name, x in values.items() if x is not None}, row["step"])

    def log_evaluation(self, row: dict[str, Any], peaks: dict[str, int | None]) -> None:
        """An entry of the record's `evaluations`, and rank 0's peaks of memory so far."""
        values = {f"eval/{name}": row[name] for name in ("loss", "perplexity")}
        memory = {name.replace("_bytes", "_gib"): size for name, size in peaks.items()}
        values |= {f"memory/{name}": size / GIB for name, size in memory.items() if size}
        self.send(values, row["step"])

    def close(self, final: dict[str, float]) -> None:
        self.send(final)
        self.end()


def perplexity(loss: float) -> float:
    """exp(loss), without overflow."""
    return math.exp(min(loss, 700.0))


def final_values(r: Record) -> dict[str, float]:
    """What sums a run up, as far as it was measured."""
    evaluation = r.evaluations[-1] if r.evaluations else {}
    sizes = r.memory.get("peak_reserved_bytes") or r.memory.get("peak_host_bytes")
    found = {
        "loss": r.loss_curve[-1][1] if r.loss_curve else None,
        "validation_loss": evaluation.get("loss"),
        "perplexity": evaluation.get("perplexity"),
        "tokens_per_s": r.performance.get("tokens_per_s"),
        "peak_memory_gib": sizes and sizes / GIB,
    }
    return {f"final/{name}": value for name, value in found.items() if value is not None}


def build_tracker(log_to: str | None, run_dir: Path, about: dict[str, Any]) -> Tracker:
    """The tracker that CONFIG's `log_to` names, told `about` the run: TensorBoard
    (`tensorboard --logdir runs`), MLflow (MLFLOW_TRACKING_URI says where), wandb
    (WANDB_MODE=offline applies), trackio (`trackio show`; TRACKIO_SPACE_ID names a Space)."""
    if log_to is None:
        return Tracker()
    if log_to == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(run_dir / "tensorboard"))
        kinds = (bool, int, float, str)
        hparams = {k: v if isinstance(v, kinds) else str(v) for k, v in about.items()}

        def send(values: dict[str, float], step: int | None = None) -> None:
            if step is None:
                writer.add_hparams(hparams, values, run_name=".")  # in the same folder
            else:
                for name, value in values.items():
                    writer.add_scalar(name, value, step)

        return Tracker(send, writer.close)
    module = importlib.import_module(log_to)
    if log_to == "mlflow":
        module.set_experiment(PROJECT)
        module.start_run(run_name=run_dir.name)
        module.log_params(about)
        return Tracker(module.log_metrics, module.end_run)
    own = {"dir": str(run_dir)} if log_to == "wandb" else {}  # trackio has wandb's interface
    module.init(project=PROJECT, name=run_dir.name, config=about, **own)
    return Tracker(module.log, module.finish)
