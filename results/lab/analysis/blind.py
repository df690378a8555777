"""Predictions held against runs that others published: errors by source.

    python -m results.lab.analysis.blind [TABLE.json]

A row of the table says where it is from, on what (`--cluster`), the model (a name, or what differs
from GPT-2 in Hugging Face's config.json), CONFIG, and what was measured: `tokens_per_s_per_gpu`,
`step_s` or `peak_gib`. No constant may be set by one source alone.
"""

import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distributed_training.planner.choose import lay_out
from distributed_training.predict.predict import Prediction, parse_cluster, predict
from distributed_training.settings.config import build_config
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import ROOT
from distributed_training.settings.machine import GIB
from distributed_training.settings.strategies import strategy_defaults, strategy_options

TABLE = ROOT / "results" / "blind.json"


def predicted(row: dict[str, Any], folder: Path) -> tuple[Prediction, float]:
    """What the planner says of a row, and its tokens a second on each GPU."""
    model = row["model"]
    if isinstance(model, dict):
        (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **model}))
        model = str(folder)
    words = {
        "precision": "bf16", "cuda_graphs": False, "loss_chunk_tokens": 0, **row["config"],
        "model": model,
    }  # fmt: skip
    config = build_config(words, defaults=strategy_defaults, options=strategy_options)
    cluster = parse_cluster(row["cluster"])
    prediction = predict(lay_out(cluster, config), cluster.rates)
    return prediction, (prediction.tokens_per_s or 0.0) / cluster.num_processes


def errors(row: dict[str, Any], folder: Path) -> tuple[float | None, float | None, bool]:
    """(predicted / measured - 1 of seconds, of bytes, whether it would be tried)."""
    prediction, tokens_per_s = predicted(row, folder)
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
                time, memory, fits = errors(row, Path(folder))
            except UserError as error:
                print(f"{row['source'][:24]:24} {row['cluster']:15} {error}")
                continue
            refused += not fits
            source = row["source"].partition(",")[0]
            gpu = row["cluster"].rpartition("x")[2]
            for what, found in (("time", time), ("memory", memory)):
                if found is not None:
                    by_source[f"{source} {gpu} {what}"].append(found)
            shown = " ".join(f"{each:+7.1%}" for each in (time, memory) if each is not None)
            model = row["model"]
            size = (
                model if isinstance(model, str) else model.get("n_embd", model.get("hidden_size"))
            )
            length = row["config"]["max_length"]
            note = "" if fits else "  said not to fit"
            print(f"{source:10} {row['cluster']:15} {size!s:8} {length:6} {shown}{note}")
    for name, each_error in sorted(by_source.items()):
        within = sum(abs(each) <= 0.10 for each in each_error)
        middle = statistics.median(each_error)
        print(f"{name:32} {within} of {len(each_error)} within 10%, median {middle:+.1%}")
    print(f"{refused} of {len(rows)} runs that ran would have been refused")


if __name__ == "__main__":
    main(sys.argv[1:])
