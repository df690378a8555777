"""Our GPT-2 against nanoGPT's, compiled, in one process on one GPU: tokens per second.

    python real_model_example.py measure nanogpt path/to/nanoGPT/model.py OUT.json

nanoGPT is not part of this repository; give a checkout's model.py. Both train gpt2-medium in bf16
with fused AdamW and clipping at 1.0 on the same random tokens; the two are timed in turns, several
rounds, and the medians are compared.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from distributed_training.models.decoder import parameter_groups
from distributed_training.models.gpt2 import SIZES
from distributed_training.models.gpt2 import build as build_model
from distributed_training.parallel.blocks import apply_compile
from distributed_training.records.record import git_commit, timestamp, versions, write_json

MODEL = "gpt2-medium"
WARMUP_STEPS, TIMED_STEPS, ROUNDS = 5, 10, 3


def build_ours(inputs: torch.Tensor, targets: torch.Tensor) -> Callable[[], None]:
    """One training step of this suite's model, as the dp strategy composes it."""
    model = build_model(SIZES[MODEL], dropout=0.0, seed=0).cuda()
    model.compute_dtype = torch.bfloat16
    apply_compile(model)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.01), lr=1e-4, fused=True)
    return _step(model, optimizer, lambda: model(inputs, targets) / targets.numel())


def build_nanogpt(file: Path, inputs: torch.Tensor, targets: torch.Tensor) -> Callable[[], None]:
    """One training step of nanoGPT's model as its train.py composes it: autocast, compile."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = module
    spec.loader.exec_module(module)
    size = SIZES[MODEL]
    settings = module.GPTConfig(
        n_layer=size.num_layers,
        n_head=size.num_heads,
        n_embd=size.hidden_size,
        block_size=size.num_positions,
        vocab_size=size.padded_vocab_size,
        dropout=0.0,
        bias=True,
    )
    model: Any = module.GPT(settings).cuda()
    optimizer = model.configure_optimizers(0.01, 1e-4, (0.9, 0.999), "cuda")
    model = torch.compile(model)

    def loss() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return model(inputs, targets)[1]

    return _step(model, optimizer, loss)


def _step(model: Any, optimizer: Any, loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
    def step() -> None:
        loss().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def time_steps(step: Callable[[], None]) -> float:
    """Seconds a step over TIMED_STEPS in a row."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(TIMED_STEPS):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / TIMED_STEPS


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare with nanoGPT's model.")
    parser.add_argument("nanogpt_model", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--max_length", type=int, default=512)
    arguments = parser.parse_args(argv)
    shape = (arguments.batch_size, arguments.max_length)
    inputs, targets = (torch.randint(0, 50257, shape, device="cuda") for _ in range(2))
    steps = {
        "ours": build_ours(inputs, targets),
        "nanogpt": build_nanogpt(arguments.nanogpt_model, inputs, targets),
    }
    for step in steps.values():
        for _ in range(WARMUP_STEPS):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            times[name].append(time_steps(step))
    tokens = shape[0] * shape[1]
    speeds = {name: tokens / statistics.median(values) for name, values in times.items()}
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
