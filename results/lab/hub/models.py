"""Measure models that run transformers' code instead of ours. Compare their speed with the speed of
the native Qwen3 model and of the Trainer with Liger. Some of the models were not used to fit any
constant, and serve to check the predictions.

    python -m results.lab.hub.models OUT.json [--tiny] [--only NAME ...]

All models train in bf16 from random weights on one GPU. The Trainer runs in a separate process.
"""

import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from distributed_training.engines.graphs import NUM_EAGER_STEPS
from distributed_training.models import HUB_PREFIX, find_model
from distributed_training.records.record import provenance, write_json
from distributed_training.settings.machine import GIB
from results.lab import checkout
from results.lab.baselines import large
from results.lab.harness import Run, each_run, open_group
from results.lab.steps import time_step

TIMED_STEPS = 10
DEADLINE_S = 150  # No case starts after this time.
_GEMMA2: dict[str, Any] = {
    "model_type": "gemma2", "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216,
    "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "max_position_embeddings": 8192, "sliding_window": 4096, "query_pre_attn_scalar": 256,
}  # fmt: skip
_PHI: dict[str, Any] = {
    "model_type": "phi", "vocab_size": 51200, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 24, "num_attention_heads": 32, "max_position_embeddings": 2048,
}  # fmt: skip
_OLMO2: dict[str, Any] = {
    "model_type": "olmo2", "vocab_size": 100352, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 16, "max_position_embeddings": 4096,
}  # fmt: skip
_NEOX: dict[str, Any] = {
    "model_type": "gpt_neox", "vocab_size": 50304, "hidden_size": 1024, "intermediate_size": 4096,
    "num_hidden_layers": 24, "num_attention_heads": 16, "max_position_embeddings": 2048,
}  # fmt: skip
# Name -> (config.json or the name of a native model, whether the model runs through transformers,
# batch_size, max_length)
CASES: dict[str, tuple[Any, bool, int, int]] = {
    "Qwen3-0.6B native": ("Qwen3-0.6B", False, 8, 1024),
    "Qwen3-0.6B hub": ("Qwen3-0.6B", True, 8, 1024),
    "olmo2-1b": (_OLMO2, True, 4, 2048),
    "phi-1.5": (_PHI, True, 4, 1024),
    "gemma2-2b, 12 blocks": (_GEMMA2, True, 4, 1024),
    "pythia-410m": (_NEOX, True, 8, 1024),
}
TRAINER = "Qwen3-0.6B Trainer + Liger"
_SMALL = {
    "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 32,
    "max_position_embeddings": 128,
}  # fmt: skip


def write_config(model: Any, folder: Path, *, tiny: bool) -> Path:
    """Write a config.json to `folder` and return `folder`. `model` is the name of a native model or
    the content of the file. With `tiny`, use small sizes."""
    folder.mkdir(parents=True)
    if isinstance(model, str):
        spec = find_model(model)
        model = spec.code.to_config(spec.size, 0)
    small = {key: value for key, value in _SMALL.items() if key in model} if tiny else {}
    (folder / "config.json").write_text(json.dumps({**model, **small}))
    return folder


def config_of(name: str, root: Path, *, tiny: bool) -> dict[str, Any]:
    """Return the CONFIG of a case."""
    model, through_hub, batch_size, length = CASES[name]
    path = str(model) if not tiny or isinstance(model, dict) else "tests/models/grouped"
    if through_hub or not isinstance(model, str):
        path = f"{HUB_PREFIX}{write_config(model, root / name.replace(' ', '-'), tiny=tiny)}"
    return {
        "model": path, "strategy": "dp", "precision": "bf16", "learning_rate": 1e-4,
        "dataset": "embedded", "tokenizer": "embedded", "weights": "random", "epochs": 100,
        "num_samples": -1, "eval_samples": 8, "checkpoint_every": 0,
        "batch_size": 2 if tiny else batch_size, "max_length": 64 if tiny else length,
    }  # fmt: skip


def measure(run: Run) -> dict[str, Any]:
    """Train a few steps. Return the time, the memory and the predictions."""
    on_gpu = torch.cuda.is_available()
    bytes_before = torch.cuda.memory_allocated() if on_gpu else 0
    seconds: list[float] = []
    peak = 0
    began_all = time.perf_counter()
    for step in range((NUM_EAGER_STEPS + 2 if on_gpu else 2) + TIMED_STEPS):
        if on_gpu and step == 2:
            torch.cuda.reset_peak_memory_stats()
        batch = run.batch(step % 4)
        step_seconds, loss = time_step(run, batch)
        seconds.append(step_seconds)
        if on_gpu and step == NUM_EAGER_STEPS - 1:
            peak = torch.cuda.max_memory_allocated()
    plan = run.plan
    predicted: Any = plan.prediction or {}
    tokens = plan.batch.global_batch_size * plan.config.max_length
    measured = {
        "ms": 1000 * statistics.median(seconds[-TIMED_STEPS:]),
        "ms op by op": 1000 * statistics.median(seconds[3:NUM_EAGER_STEPS]),
        "all_s": time.perf_counter() - began_all,
        "peak_gib": peak / GIB,
        "before_gib": bytes_before / GIB,
        "graph": bool(getattr(run.engine.step_graph, "graph", None)),  # type: ignore[attr-defined]
        "compile": plan.config.compile,
        "loss_chunk_tokens": plan.config.loss_chunk_tokens,
        "loss": loss,
        "parameters": plan.size.num_parameters,
        "predicted_ms": 1000 * (predicted.get("step_time_s") or 0.0),
        "predicted_gib": predicted.get("peak_bytes", 0) / GIB,
        "predicted_parts": predicted.get("memory_bytes"),
        "bound_by": predicted.get("bound_by"),
        "notes": list(plan.notes),
    }
    return {**measured, "tokens_per_s": tokens / measured["ms"] * 1000}


def train_with_trainer(*, tiny: bool) -> dict[str, Any]:
    """Train the same model with transformers' Trainer and Liger kernels in another process."""
    model, _, batch_size, length = CASES["Qwen3-0.6B hub"]
    row = {"model": model, "batch_size": batch_size, "max_length": length, "trainer": {}}
    trainer = large.measure_trainer({**row, **large.TINY} if tiny else row)
    return {
        "ms": 1000 * trainer["step_time_s"], "tokens_per_s": trainer["tokens_per_s"],
        "peak_gib": trainer.get("peak_allocated_bytes", 0) / GIB,
        "predicted_ms": None, "predicted_gib": None,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = checkout.Parser(description="Measure models that run transformers' code.")
    parser.add_argument("output", type=Path, nargs="?")
    parser.add_argument("--tiny", action="store_true", help="run a smoke test on a CPU")
    parser.add_argument("--only", nargs="*", default=[*CASES, TRAINER])
    arguments = parser.parse_args(argv)
    tiny = arguments.tiny
    result: dict[str, Any] = {
        "what": "models that run transformers' code, in bf16 and one process",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        **provenance("python -m results.lab.hub.models OUT.json"),
        "cases": {},
    }
    cases = result["cases"]
    with tempfile.TemporaryDirectory() as root:
        names = [name for name in CASES if name in arguments.only]
        configs = {name: config_of(name, Path(root), tiny=tiny) for name in names}
        with open_group() as group:
            for name, ranks in each_run(group, configs, measure, deadline_s=DEADLINE_S):
                cases[name] = ranks if isinstance(ranks, str) else ranks[0]
                print(name, json.dumps(cases[name]), flush=True)
                write_json(arguments.output, result)
    if TRAINER in arguments.only:
        try:
            cases[TRAINER] = train_with_trainer(tiny=tiny)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            cases[TRAINER] = str(error)
        write_json(arguments.output, result)
    columns = ("ms", "predicted_ms", "peak_gib", "predicted_gib", "tokens_per_s")
    rows = [
        [name, *(case.get(column) for column in columns)]
        if isinstance(case, dict)
        else [name, case[:200]]
        for name, case in cases.items()
    ]
    print(tabulate(rows, ["case", *columns], floatfmt=".1f"))
    speed = {name: case["tokens_per_s"] for name, case in cases.items() if isinstance(case, dict)}
    for name, goal in (("Qwen3-0.6B native", 0.85), (TRAINER, 1.15)):
        if {name, "Qwen3-0.6B hub"} <= speed.keys():
            ratio = speed["Qwen3-0.6B hub"] / speed[name]
            print(f"Qwen3-0.6B hub / {name}: {ratio:.3f} (goal {goal})")
    return 0


if __name__ == "__main__":
    checkout.run(main)
