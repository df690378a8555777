"""Our GPT-2 against nanoGPT's, compiled, in one process on one GPU: tokens per second.

    python real_model_example.py measure nanogpt path/to/nanoGPT/model.py OUT.json

nanoGPT is not part of this repository; give a checkout's model.py. Both train gpt2-medium in bf16
with fused AdamW and clipping at 1.0 on the same tokens; the two are timed in turns, several
rounds, and the medians are compared.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from distributed_training.engines.base import to_device
from distributed_training.measure.harness import Run, each_run, open_group
from distributed_training.records.record import git_commit, timestamp, versions, write_json

CONFIG: dict[str, Any] = {
    "model": "gpt2-medium", "strategy": "dp", "precision": "bf16", "learning_rate": 1e-4,
    "dataset": "embedded", "tokenizer": "embedded", "weights": "random", "batch_size": 64,
    "max_length": 512,
}  # fmt: skip
WARMUP_STEPS, TIMED_STEPS, ROUNDS = 5, 10, 3


def build_nanogpt(run: Run, file: Path) -> Callable[[], Any]:
    """One training step of nanoGPT's model as its train.py composes it: autocast, compile."""
    sys.path.insert(0, str(file.resolve().parent))
    module = importlib.import_module(file.stem)
    size, device = run.plan.size, run.topology.device
    settings = module.GPTConfig(
        n_layer=size.num_layers,
        n_head=size.num_heads,
        n_embd=size.hidden_size,
        block_size=size.num_positions,
        vocab_size=size.padded_vocab_size,
        dropout=0.0,
        bias=True,
    )
    eager = module.GPT(settings).to(device)
    optimizer = eager.configure_optimizers(0.01, 1e-4, (0.9, 0.999), device.type)
    model: Any = torch.compile(eager)
    inputs, targets = to_device(device, *run.batch(0).micro_batches[0])

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(inputs, targets)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def compare(run: Run, file: Path) -> dict[str, list[float]]:
    """Seconds a step of both models on the run's first batch, of each round."""
    ours: Callable[[], Any] = functools.partial(run.engine.train_step, run.batch(0))
    steps = {"ours": ours, "nanogpt": build_nanogpt(run, file)}
    for step in steps.values():
        for _ in range(WARMUP_STEPS):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(TIMED_STEPS):
                step()
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - began) / TIMED_STEPS)
    return times


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare with nanoGPT's model.")
    parser.add_argument("nanogpt_model", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args(argv)
    with open_group() as group:
        use = functools.partial(compare, file=arguments.nanogpt_model)
        ((_, found),) = each_run(group, {"both": CONFIG}, use)
    if isinstance(found, str):
        raise SystemExit(found)
    (times,) = found
    shape = [CONFIG["batch_size"], CONFIG["max_length"]]
    tokens = shape[0] * shape[1]
    speeds = {name: tokens / statistics.median(rounds) for name, rounds in times.items()}
    result = {
        "what": "gpt2-medium, bf16, compiled, fused AdamW, one process",
        "shape": shape,
        "gpu": torch.cuda.get_device_name(),
        "versions": versions(),
        "git_commit": git_commit(),
        "at": timestamp(),
        "step_time_s": times,
        "tokens_per_s": speeds,
        "ours_over_nanogpt": speeds["ours"] / speeds["nanogpt"],
    }
    write_json(arguments.output, result)
    print(json.dumps({key: result[key] for key in ("tokens_per_s", "ours_over_nanogpt")}))
    return 0
