"""Measure how low-bit Adam moments and low-bit base weights for LoRA affect loss, memory and time.

    python results/lab/low_bits.py PART --out FOLDER [--tiny]
    torchrun --nproc_per_node=2 results/lab/low_bits.py PART --out FOLDER

PART is one of:

- `optimizers`: train gpt2 for 300 steps on real text with each optimizer. AdamW runs with three
  seeds, and the differences between these runs show the noise.
- `base`: train LoRA on Qwen3-8B and Qwen3-4B with one sequence of 1,024 tokens per GPU
  and step, and with random base weights in 16 bits and in 4 bits.
- `full`: train all weights of Llama-3.2-1B with each optimizer.

--tiny is a smoke test for CPUs. The program prints a table that includes the predictions, and
writes all results to FOLDER/low_bits_PART.json.
"""

import shlex
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import checkout
import torch

from distributed_training.records.record import provenance, write_json
from distributed_training.train.loop import learning_rate
from results.lab.harness import Run, each_run, open_group
from results.lab.steps import time_step

COMMON: dict[str, Any] = {
    "dataset": "embedded", "tokenizer": "embedded", "weights": "random", "num_samples": -1,
    "eval_samples": 64, "checkpoint_every": 0,
}  # fmt: skip
OPTIMIZERS = ("adamw", "adamw-bf16", "adamw-8bit")
NUM_EVALUATED = 64  # validation samples
TIMED_STEPS = 10


def optimizer_runs(*, tiny: bool) -> dict[str, Any]:
    size = {"model": "gpt2", "batch_size": 16, "max_length": 512}
    if tiny:
        size = {"model": "gpt2-tiny", "batch_size": 4, "max_length": 64}
    common = {**COMMON, **size, "strategy": "dp", "learning_rate": 6e-4, "warmup_steps": 20}
    if tiny:
        common["learning_rate"] = 3e-3
    runs = {name: {**common, "optimizer": name} for name in OPTIMIZERS}
    return {
        **runs,
        "adamw, seed 43": {**common, "seed": 43},
        "adamw, seed 44": {**common, "seed": 44},
    }


def base_runs(*, tiny: bool) -> dict[str, Any]:
    runs = {}
    for model in ("gpt2-tiny",) if tiny else ("Qwen3-8B", "Qwen3-4B"):
        for base in ("nf4", "auto"):
            runs[f"{model} {base}"] = {
                **COMMON, "model": model, "strategy": "dp", "batch_size": 1,
                "max_length": 64 if tiny else 1024, "lora_rank": 16, "base_dtype": base,
                "activation_checkpointing": "full", "learning_rate": 2e-4, "optimizer": "adamw",
                "loss_chunk_tokens": 32 if tiny else 1024,
            }  # fmt: skip
    return runs


def full_runs(*, tiny: bool) -> dict[str, Any]:
    model = {"model": "gpt2-tiny", "batch_size": 2, "max_length": 64}
    if not tiny:
        model = {"model": "Llama-3.2-1B", "batch_size": 4, "max_length": 2048}
    strategy = "fsdp" if torch.distributed.is_torchelastic_launched() else "dp"
    return {
        name: {**COMMON, **model, "strategy": strategy, "optimizer": name, "learning_rate": 1e-4}
        for name in OPTIMIZERS
    }


PARTS = {
    "optimizers": (optimizer_runs, 300), "base": (base_runs, 24), "full": (full_runs, 30),
}  # fmt: skip


def measure(run: Run, num_steps: int) -> dict[str, Any]:
    """Train for `num_steps` steps. Return the loss of each step, the first and the median step
    time, the loss on `NUM_EVALUATED` validation samples, and the peak memory."""
    losses = []
    seconds = []
    if torch.cuda.is_available():
        loading_peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    for step in range(num_steps):
        run.engine.set_learning_rate(learning_rate(run.plan.config, step, num_steps))
        batch = run.batch(step)
        step_seconds, loss = time_step(run, batch)
        seconds.append(step_seconds)
        losses.append(loss)
    total = torch.zeros((), device=run.topology.device)
    targets = 0
    for indices in run.sampler.eval_indices(NUM_EVALUATED):
        arrays = run.data.validation.batch(indices)
        total += run.engine.eval_step(*arrays)
        targets += int((arrays[1] >= 0).sum())
    measured = {
        "losses": losses, "step_time_s": statistics.median(seconds[-TIMED_STEPS:]),
        "first_step_s": seconds[0], "evaluation": float(total) / targets,
        "tokens_per_step": batch.num_tokens, "prediction": run.plan.prediction,
        "dtypes": run.engine.describe_dtypes(),
    }  # fmt: skip
    if torch.cuda.is_available():
        measured |= {
            "loading_peak_bytes": loading_peak, "peak_bytes": torch.cuda.max_memory_allocated(),
            "graph": run.engine.step_graph.graph is not None,  # type: ignore[attr-defined]
        }  # fmt: skip
    return measured


def show(name: str, result: Mapping[str, Any]) -> str:
    predicted = result["prediction"]
    gib = result.get("peak_bytes", 0) / 2**30
    return (
        f"{name:24} {1000 * result['step_time_s']:9.1f} ms {gib:7.2f} GiB"
        f"  last losses {statistics.mean(result['losses'][-20:]):.4f}"
        f"  evaluation {result['evaluation']:.4f}"
        f"  predicted {predicted.get('peak_bytes', 0) / 2**30:.2f} GiB,"
        f" {1000 * (predicted.get('step_time_s') or 0):.0f} ms"
    )


def main() -> int:
    parser = checkout.Parser(description=__doc__)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int)
    arguments = parser.parse_args()
    make_runs, num_steps = PARTS[arguments.part]
    num_steps = arguments.steps or num_steps
    record = {**provenance(shlex.join(sys.argv)), "runs": {}}
    with open_group() as group:
        runs = make_runs(tiny=arguments.tiny)
        for name, ranks in each_run(group, runs, lambda run: measure(run, num_steps)):
            if group.process.rank > 0:
                continue
            record["runs"][name] = ranks
            print(name, ranks if isinstance(ranks, str) else show("", ranks[0]), flush=True)
            arguments.out.mkdir(parents=True, exist_ok=True)
            write_json(arguments.out / f"low_bits_{arguments.part}.json", record)
    return 0


if __name__ == "__main__":
    checkout.run(main)
