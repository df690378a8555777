"""Compare the training speed of two compiled models on one GPU: our GPT-2 and nanoGPT's GPT-2.

    python -m results.lab.baselines.nanogpt path/to/nanoGPT/model.py OUT.json

This repository does not contain nanoGPT, so pass the model.py from a checkout of nanoGPT. Both
models train in the same process and on the same tokens, in bf16, with fused AdamW and gradient
clipping at 1.0. For each model size and batch size, the program times the two models alternately
for several rounds and compares their median tokens per second. Our step is replayed as one CUDA
graph if the default, `cuda_graphs=auto`, selects graphs. The step for nanoGPT's model has the same
structure as the step in nanoGPT's train.py.
"""

import functools
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from distributed_training.engines.graphs import NUM_EAGER_STEPS, to_device
from distributed_training.records.record import provenance, write_json
from results.lab import checkout
from results.lab.harness import Run, each_run, open_group

CONFIG: dict[str, Any] = {
    "strategy": "dp", "precision": "bf16", "learning_rate": 1e-4, "dataset": "embedded",
    "tokenizer": "embedded", "weights": "random", "num_samples": -1,
}  # fmt: skip
SHAPES = (  # model, sequences, tokens per sequence
    ("gpt2-medium", 4, 512), ("gpt2-medium", 64, 512), ("gpt2-medium", 32, 1024),
    ("gpt2", 64, 1024), ("gpt2-large", 32, 1024),
)  # fmt: skip
WARMUP_STEPS = NUM_EAGER_STEPS + 3
TIMED_STEPS = 10
ROUNDS = 3


def build_nanogpt(run: Run, file: Path) -> Callable[[], Any]:
    """Return a function that trains nanoGPT's model for one step. The step has the same structure
    as the step in nanoGPT's train.py, including autocast and torch.compile."""
    sys.path.insert(0, str(file.resolve().parent))
    module = importlib.import_module(file.stem)
    size = run.plan.size
    device = run.topology.device
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
    """Time both models on the run's first batch. Return each model's seconds per step in each
    round."""
    our_step: Callable[[], Any] = functools.partial(run.engine.train_step, run.batch(0))
    steps = {"ours": our_step, "nanoGPT": build_nanogpt(run, file)}
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
    parser = checkout.Parser(description="Compare with nanoGPT's model.")
    parser.add_argument("nanogpt_model", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args(argv)
    runs: dict[str, dict[str, Any]] = {
        f"{model} {batch} x {length}": {
            **CONFIG, "model": model, "batch_size": batch, "max_length": length,
        }
        for model, batch, length in SHAPES
    }  # fmt: skip
    result: dict[str, Any] = {
        "what": "bf16, compiled, fused AdamW, one process",
        "gpu": torch.cuda.get_device_name(),
        **provenance("python -m results.lab.baselines.nanogpt path/to/nanoGPT/model.py OUT.json"),
        "shapes": {},
    }
    with open_group() as group:
        use = functools.partial(compare, file=arguments.nanogpt_model)
        for name, ranks in each_run(group, runs, use):
            if isinstance(ranks, str):
                raise SystemExit(ranks)
            (times,) = ranks
            tokens = runs[name]["batch_size"] * runs[name]["max_length"]
            speeds = {model: tokens / statistics.median(rounds) for model, rounds in times.items()}
            ratio = speeds["ours"] / speeds["nanoGPT"]
            result["shapes"][name] = {
                **speeds, "ours / nanoGPT": ratio, "step_time_s": times,
            }  # fmt: skip
            print(f"{name}: {ratio:.3f} of nanoGPT's speed, {speeds['ours']:,.0f} tokens/s")
            write_json(arguments.output, result)
    return 0


if __name__ == "__main__":
    checkout.run(main)
