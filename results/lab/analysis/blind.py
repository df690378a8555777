"""Compare predictions with runs that others published, and print the errors by source.

    python -m results.lab.analysis.blind [TABLE.json]

Each table row contains the source, the cluster (as for `--cluster`), the model, CONFIG and the
measurements: `tokens_per_s_per_gpu`, `step_s` or `peak_gib`. The model is either a name or the
entries of a Hugging Face config.json that differ from GPT-2's. If you fit a constant to these runs,
use more than one source.
"""

import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distributed_training.planner.make_plan import draft_plan
from distributed_training.predict.predict import Prediction, parse_cluster
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import ROOT
from distributed_training.settings.machine import GIB
from distributed_training.settings.request import build_config

TABLE = ROOT / "results" / "blind.json"


def predict_row(row: dict[str, Any], folder: Path) -> tuple[Prediction, float]:
    """Return the prediction for a row, and the predicted tokens/s per GPU."""
    model = row["model"]
    if isinstance(model, dict):
        (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **model}))
        model = str(folder)
    values = {
        "precision": "bf16", "cuda_graphs": False, "loss_chunk_tokens": 0, **row["config"],
        "model": model,
    }  # fmt: skip
    config = build_config(values)
    cluster = parse_cluster(row["cluster"])
    prediction = Prediction(draft_plan(config, cluster), cluster.rates)
    return prediction, (prediction.tokens_per_s or 0.0) / cluster.num_processes


def measured_s(row: dict[str, Any]) -> float | None:
    """Return the measured seconds per step of a row, or None if the row lacks them."""
    if "tokens_per_s_per_gpu" not in row:
        return row.get("step_s")
    config = row["config"]
    tokens = config["batch_size"] * config.get("grad_accum_steps", 1) * config["max_length"]
    return tokens / row["tokens_per_s_per_gpu"]


def prediction_errors(row: dict[str, Any], folder: Path) -> tuple[float | None, float | None, bool]:
    """Return the relative errors of the predicted time and memory, and whether the run is predicted
    to fit in memory. An error is None if the row lacks that measurement."""
    prediction, tokens_per_s = predict_row(row, folder)
    assert prediction.step is not None
    time = memory = None
    if "tokens_per_s_per_gpu" in row:
        time = row["tokens_per_s_per_gpu"] / tokens_per_s - 1
    if "step_s" in row:
        time = prediction.step.seconds / row["step_s"] - 1
    if "peak_gib" in row:
        memory = prediction.memory.peak_bytes / (row["peak_gib"] * GIB) - 1
    return time, memory, prediction.fits


def main(argv: Sequence[str]) -> None:
    rows = json.loads(Path(argv[0] if argv else TABLE).read_text(encoding="utf-8"))
    by_source: dict[str, list[float]] = defaultdict(list)
    refused = 0
    with tempfile.TemporaryDirectory() as folder:
        for row in rows:
            try:
                time, memory, fits = prediction_errors(row, Path(folder))
            except UserError as mistake:
                print(f"{row['source'][:24]:24} {row['cluster']:15} {mistake}")
                continue
            refused += not fits
            source = row["source"].partition(",")[0]
            gpu = row["cluster"].rpartition("x")[2]
            for quantity, error in (("time", time), ("memory", memory)):
                if error is not None:
                    by_source[f"{source} {gpu} {quantity}"].append(error)
            error_text = " ".join(f"{error:+7.1%}" for error in (time, memory) if error is not None)
            model = row["model"]
            size = (
                model if isinstance(model, str) else model.get("n_embd", model.get("hidden_size"))
            )
            length = row["config"]["max_length"]
            note = "" if fits else "  predicted not to fit"
            print(f"{source:10} {row['cluster']:15} {size!s:8} {length:6} {error_text}{note}")
    for name, source_errors in sorted(by_source.items()):
        num_within = sum(abs(error) <= 0.10 for error in source_errors)
        median = statistics.median(source_errors)
        print(f"{name:32} {num_within} of {len(source_errors)} within 10%, median {median:+.1%}")
    print(f"The planner would have rejected {refused} of {len(rows)} published runs.")


if __name__ == "__main__":
    main(sys.argv[1:])
