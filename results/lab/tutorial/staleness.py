"""Measure the effect of weight stashing on gradient errors and losses in real training runs.

    python results/lab/tutorial/staleness.py pipedream_tutorial/records/cpu-staleness.json

Learning rates are per batch, because the loss of a microbatch is divided by the number of
microbatches in a batch (see StageTrainer)."""

import json
import math
import platform
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import checkout  # noqa: F401
import torch
from pipedream.__main__ import SCHEDULES_TO_TRAIN
from pipedream.errors import UserError, main_with_errors
from pipedream.schedules.orders import SCHEDULES
from pipedream.train.oracle import MicrobatchError, final_loss, train, train_and_check


def gradient_errors(
    num_stages: Sequence[int],
    learning_rates: Sequence[float],
    modes: Sequence[str],
    seeds: Sequence[int],
    **settings: Any,
) -> list[dict[str, Any]]:
    """Return the gradient errors of real runs for each depth, learning rate and schedule (`mode`).
    Errors are medians over microbatches and seeds. The first p microbatches of each run are
    omitted, because no weights change while the pipeline fills. `median_staleness_error` is the
    error relative to the gradient at the current weights."""
    rows = []
    for p, rate, mode in product(num_stages, learning_rates, modes):
        full_pipeline_errors: list[MicrobatchError] = []
        for seed in seeds:
            _, errors = train_and_check(
                mode, num_stages=p, learning_rate=rate, seed=seed, **settings
            )
            full_pipeline_errors += [error for error in errors if error.microbatch >= p]
        row = {
            "num_stages": p,
            "learning_rate": rate,
            "mode": mode,
            "median_relative_error": finite(median(e.relative_error for e in full_pipeline_errors)),
            "per_stage": [
                finite(median(e.per_stage[s] for e in full_pipeline_errors)) for s in range(p)
            ],
            "median_staleness_error": finite(
                median(e.staleness_error for e in full_pipeline_errors)
            ),
        }
        rows.append(row)
    return rows


def finite(number: float) -> float | None:
    """Return `number`, or None if it is not finite, because JSON does not support such numbers."""
    return number if math.isfinite(number) else None


def final_losses(
    schedule_names: Sequence[str],
    num_stages: Sequence[int],
    learning_rates: Sequence[float],
    num_microbatches: int,
    seeds: Sequence[int],
    **settings: Any,
) -> list[dict[str, Any]]:
    """Return the final losses (see oracle.final_loss) for each depth, learning rate and schedule,
    with one loss per seed. 2BW is omitted at depths p for which a batch has fewer than p - 1
    microbatches."""
    rows = []
    for p, rate, name in product(num_stages, learning_rates, schedule_names):
        if SCHEDULES[name].policy == "2bw" and num_microbatches < p - 1:
            continue
        losses, num_diverged = [], 0
        for seed in seeds:
            result = train(
                name, num_stages=p, learning_rate=rate, seed=seed,
                num_microbatches=num_microbatches, **settings,
            )  # fmt: skip
            loss = final_loss(result, num_microbatches)
            losses.append(loss if math.isfinite(loss) else math.inf)
            num_diverged += result.diverged
        row = {
            "name": name,
            "num_stages": p,
            "learning_rate": rate,
            "losses": list(map(finite, losses)),
            "median": finite(median(losses)),
            "num_diverged": num_diverged,
        }
        rows.append(row)
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
        "schedule_names": ["1f1b", *SCHEDULES_TO_TRAIN[3:]],
        "num_stages": [2, 4, 8],
        "learning_rates": [0.1, 0.25, 0.5, 1.0],
        "num_microbatches": 4,
        "layers_per_stage": 2,
        "num_batches": 60,
        "seeds": [0, 1, 2, 3, 4],
    },
}


def main() -> None:
    """Run STUDY on one thread, write the record that the tutorial's text quotes."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).parent.is_dir():
        raise UserError(
            "give one path in an existing folder",
            "type python results/lab/tutorial/staleness.py "
            "pipedream_tutorial/records/cpu-staleness.json",
        )
    torch.set_num_threads(1)
    begin = time.process_time()
    errors = gradient_errors(**STUDY["gradient_errors"])
    losses = final_losses(**STUDY["final_losses"])
    record = {
        "command": f"python results/lab/tutorial/staleness.py {sys.argv[1]}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": 1,
        "dtype": "float64",
        "cpu_seconds": round(time.process_time() - begin, 1),
        "settings": STUDY,
        "gradient_errors": errors,
        "final_losses": losses,
    }
    Path(sys.argv[1]).write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main_with_errors(main)
