"""Predictions held against runs that others published.

A row of results/blind.json says where it is from, on what (`--cluster`), the model (a name, or what
differs from GPT-2 in Hugging Face's config.json), CONFIG, and what was measured:
`tokens_per_s_per_gpu`, `step_s` or `peak_gib`. No constant may be set by one source alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from distributed_training.advise.cluster import lay_out_on, parse_cluster
from distributed_training.predict.predict import predict
from distributed_training.settings.config import build_config
from distributed_training.settings.files import ROOT
from distributed_training.settings.gpus import GIB
from distributed_training.settings.strategies import strategy_defaults, strategy_options

TABLE = ROOT / "results" / "blind.json"


def errors(row: dict[str, Any], folder: Path) -> tuple[float | None, float | None, bool]:
    """(predicted / measured - 1 of seconds, of bytes, whether it would be tried)."""
    model = row["model"]
    if isinstance(model, dict):
        (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **model}))
        model = str(folder)
    words = {"precision": "bf16", "cuda_graphs": False, **row["config"], "model": model}
    config = build_config(words, defaults=strategy_defaults, options=strategy_options)
    cluster = parse_cluster(row["cluster"])
    prediction = predict(lay_out_on(cluster, config), cluster.rates)
    tokens_per_s = (prediction.tokens_per_s or 0.0) / cluster.num_processes
    assert prediction.step is not None
    time = memory = None
    if "tokens_per_s_per_gpu" in row:
        time = row["tokens_per_s_per_gpu"] / tokens_per_s - 1
    if "step_s" in row:
        time = prediction.step.seconds / row["step_s"] - 1
    if "peak_gib" in row:
        memory = prediction.memory.peak_bytes / (row["peak_gib"] * GIB) - 1
    return time, memory, prediction.fits
