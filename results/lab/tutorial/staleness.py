"""What weight stashing is for, in numbers: gradient errors and losses of real training.

    python results/lab/tutorial/staleness.py pipedream_tutorial/records/cpu-staleness.json

Learning rates are per batch: the loss of a microbatch is divided by the microbatches of a batch
(see StageTrainer).
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
import torch
from pipedream.errors import UserError, main_with_errors
from pipedream.schedules.catalogue import SCHEDULES
from pipedream.train.gradients import MicrobatchError, train_and_check
from pipedream.train.oracle import final_loss, train
from pipedream.train.report import TRAINED


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientError:
    """Medians over microbatches (and seeds), the first p of each run left out: the pipeline was
    filling, and no weight had changed under them."""

    num_stages: int
    learning_rate: float
    mode: str
    """A schedule's name."""
    median_relative_error: float
    per_stage: tuple[float, ...]
    median_staleness_error: float
    """Against the gradient at the current weights."""


def gradient_errors(
    num_stages: Sequence[int],
    learning_rates: Sequence[float],
    modes: Sequence[str] = ("pipedream", "pipedream-no-stash"),
    *,
    num_microbatches: int = 8,
    layers_per_stage: int = 2,
    num_batches: int = 6,
    seeds: Sequence[int] = (0,),
) -> list[GradientError]:
    """Gradient errors over depths, learning rates and schedules, from real runs."""
    rows = []
    for p, learning_rate, mode in product(num_stages, learning_rates, modes):
        errors: list[MicrobatchError] = []
        for seed in seeds:
            _, of_seed = train_and_check(
                mode,
                num_stages=p,
                num_microbatches=num_microbatches,
                layers_per_stage=layers_per_stage,
                learning_rate=learning_rate,
                num_batches=num_batches,
                seed=seed,
            )
            errors += of_seed
        rows.append(_medians(errors, p, learning_rate, mode))
    return rows


def _medians(
    errors: list[MicrobatchError], num_stages: int, learning_rate: float, mode: str
) -> GradientError:
    kept = [error for error in errors if error.microbatch >= num_stages]
    if not kept:
        raise ValueError(f"no microbatch after the first {num_stages}: nothing to take medians of")
    return GradientError(
        num_stages=num_stages,
        learning_rate=learning_rate,
        mode=mode,
        median_relative_error=statistics.median(e.relative_error for e in kept),
        per_stage=tuple(statistics.median(e.per_stage[s] for e in kept) for s in range(num_stages)),
        median_staleness_error=statistics.median(e.staleness_error for e in kept),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class FinalLosses:
    """Where one schedule ends at one depth and learning rate, over several seeds."""

    name: str
    num_stages: int
    learning_rate: float
    losses: list[float]
    """One a seed, as oracle.final_loss; infinite where it is no number."""
    median: float
    num_diverged: int


def final_losses(
    schedule_names: Sequence[str],
    num_stages: Sequence[int],
    learning_rates: Sequence[float],
    *,
    num_microbatches: int = 4,
    layers_per_stage: int = 2,
    num_batches: int = 60,
    seeds: Sequence[int] = (0, 1, 2),
) -> list[FinalLosses]:
    """Final losses by depth, rate and schedule; 2BW has none with less than p - 1 microbatches."""
    rows = []
    for p, learning_rate, name in product(num_stages, learning_rates, schedule_names):
        if SCHEDULES[name].policy == "2bw" and num_microbatches < p - 1:
            continue
        losses, num_diverged = [], 0
        for seed in seeds:
            result = train(
                name,
                num_stages=p,
                num_microbatches=num_microbatches,
                layers_per_stage=layers_per_stage,
                learning_rate=learning_rate,
                num_batches=num_batches,
                seed=seed,
            )
            loss = final_loss(result, num_microbatches, seed)
            losses.append(loss if math.isfinite(loss) else math.inf)
            num_diverged += result.diverged
        rows.append(
            FinalLosses(
                name=name,
                num_stages=p,
                learning_rate=learning_rate,
                losses=losses,
                median=statistics.median(losses),
                num_diverged=num_diverged,
            )
        )
    return rows


STUDY: dict[str, dict[str, Any]] = {
    "gradient_errors": {
        "num_stages": [2, 4, 8],
        "learning_rates": [0.01, 0.03, 0.1, 0.3, 1.0],
        "modes": ["pipedream", "pipedream-no-stash"],
        "num_microbatches": 8,
        "layers_per_stage": 2,
        "num_batches": 6,
        "seeds": [0, 1, 2],
    },
    "final_losses": {
        "schedule_names": ["1f1b", *TRAINED[3:]],
        "num_stages": [2, 4, 8],
        "learning_rates": [0.1, 0.25, 0.5, 1.0],
        "num_microbatches": 4,
        "layers_per_stage": 2,
        "num_batches": 60,
        "seeds": [0, 1, 2, 3, 4],
    },
}


def save_study(path: Path) -> dict[str, Any]:
    """Run STUDY on one thread and write its rows as JSON; numbers that are infinite become null.

    Raises UserError, before anything runs, where the file's folder does not exist.
    """
    if not path.parent.is_dir():
        raise UserError(f"{path.parent} is not a folder", "give a path in a folder that exists")
    torch.set_num_threads(1)
    begin = time.process_time()
    rows: dict[str, list[Any]] = {
        "gradient_errors": gradient_errors(**STUDY["gradient_errors"]),
        "final_losses": final_losses(**STUDY["final_losses"]),
    }
    record = {
        "command": f"python results/lab/tutorial/staleness.py {path}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": 1,
        "dtype": "float64",
        "cpu_seconds": round(time.process_time() - begin, 1),
        "settings": STUDY,
        **{key: [_json_row(asdict(row)) for row in found] for key, found in rows.items()},
    }
    path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    return record


def _json_row(row: dict[str, Any]) -> dict[str, Any]:
    def finite(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [finite(v) for v in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {key: finite(value) for key, value in row.items()}


def main() -> None:
    """Write the record that the tutorial's text quotes, and print it."""
    if len(sys.argv) != 2:
        raise UserError(
            "one path is needed",
            "type python results/lab/tutorial/staleness.py "
            "pipedream_tutorial/records/cpu-staleness.json",
        )
    record = save_study(Path(sys.argv[1]))
    for row in record["gradient_errors"]:
        print(
            f"p={row['num_stages']} lr={row['learning_rate']:g} {row['mode']}: gradient error "
            f"{_shown(row['median_relative_error'])}, by stage "
            f"{' '.join(map(_shown, row['per_stage']))}; against current weights "
            f"{_shown(row['median_staleness_error'])}"
        )
    for row in record["final_losses"]:
        print(
            f"p={row['num_stages']} lr={row['learning_rate']:g} {row['name']}: final loss "
            f"{_shown(row['median'])}, diverged {row['num_diverged']} of {len(row['losses'])}"
        )


def _shown(number: float | None) -> str:
    return "infinite" if number is None else f"{number:.3g}"


if __name__ == "__main__":
    main_with_errors(main)
