"""Compare the training speed of this suite and of transformers' Trainer, on a GPU or CPU.

    python -m results.lab.baselines.trainer OUT.json [--tiny]

Both train the same model from the same random weights in bf16, with fused AdamW and gradient
clipping at 1.0. The Trainer runs with and without torch.compile. Each measurement runs in a
separate process and inherits no memory or compiled kernels. No download is needed, because tokens
are random or come from the embedded text. --tiny is a smoke test.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from distributed_training.engines.graphs import NUM_EAGER_STEPS
from distributed_training.models import find_model
from distributed_training.records.record import provenance, write_json
from results.lab import checkout
from results.lab.harness import Run, each_run, open_group

CASES = (  # model, sequences, tokens per sequence
    ("Qwen3-0.6B", 8, 1024), ("SmolLM2-135M", 32, 1024), ("gpt2-medium", 4, 512),
    ("gpt2", 64, 1024),
)  # fmt: skip
TINY = (("tests/models/grouped", 2, 32), ("gpt2-tiny", 2, 32))
VARIANTS = ("ours", "compiled Trainer", "Trainer")
WARMUP_STEPS = NUM_EAGER_STEPS + 8
TIMED_STEPS = 30
LIMIT_S = 900


class Clock:
    """Measures the time of the steps after the warm-up, and the peak GPU memory of the process."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.began = 0.0
        self.seconds = 0.0

    def tick(self) -> None:
        """Register that a step has just ended."""
        self.num_steps += 1
        if self.num_steps in (WARMUP_STEPS, WARMUP_STEPS + TIMED_STEPS):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.seconds = time.perf_counter() - self.began
            self.began = time.perf_counter()

    def result(self) -> dict[str, float]:
        """Return the time per timed step in seconds and, on a GPU, the peak memory in bytes."""
        measured = {"step_time_s": self.seconds / TIMED_STEPS}
        if torch.cuda.is_available():
            measured["peak_bytes"] = float(torch.cuda.max_memory_allocated())
        return measured


def train_with_suite(model: str, batch: int, length: int) -> dict[str, float]:
    """Train our model in bf16 and return the measurements. Settings that are not set here keep
    their defaults."""
    config = {
        "strategy": "dp", "precision": "bf16", "learning_rate": 1e-4, "dataset": "embedded",
        "tokenizer": "embedded", "weights": "random", "model": model, "batch_size": batch,
        "max_length": length, "checkpoint_every": 0,
    }  # fmt: skip

    def train(run: Run) -> dict[str, float]:
        clock = Clock()
        for step in range(WARMUP_STEPS + TIMED_STEPS):
            run.engine.train_step(run.batch(step % 4))
            clock.tick()
        return clock.result()

    with open_group() as group:
        for _, ranks in each_run(group, {"ours": config}, train):
            if isinstance(ranks, str):
                raise SystemExit(ranks)
            return dict(ranks[0])
    raise AssertionError("one run")


def train_with_trainer(model: str, batch: int, length: int, *, compiled: bool) -> dict[str, float]:
    """Train the model with transformers' Trainer, from the same random weights as in
    `train_with_suite`."""
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    clock = Clock()

    class Ticks(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.tick()

    spec = find_model(model)
    steps = WARMUP_STEPS + TIMED_STEPS
    with tempfile.TemporaryDirectory() as folder:
        cpu = torch.device("cpu")
        source = spec.build_meta_model().random_source(0, cpu, hashed=False)
        spec.save(source, Path(folder), eos_token_id=0, dtype=torch.float32)
        hf_model = AutoModelForCausalLM.from_pretrained(folder)
        hf_model.config.use_cache = False
        for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):  # GPT-2's dropout. Ours is 0.
            if hasattr(hf_model.config, key):
                setattr(hf_model.config, key, 0.0)
        for module in hf_model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        ids = torch.randint(spec.size.vocab_size, (steps * batch, length))
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=batch, max_steps=steps, bf16=True,
            optim="adamw_torch_fused", learning_rate=1e-4, max_grad_norm=1.0, report_to="none",
            torch_compile=compiled, save_strategy="no", logging_strategy="no", disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )  # fmt: skip
        rows = [{"input_ids": row, "labels": row} for row in ids]
        Trainer(hf_model, arguments, train_dataset=rows, callbacks=[Ticks()]).train()
    return clock.result()


def measure(variant: str, case: tuple[str, int, int]) -> dict[str, float]:
    """Measure one case in a separate process."""
    module = "results.lab.baselines.trainer"
    command = [sys.executable, "-m", module, "--one", json.dumps([variant, *case])]
    # With several GPUs, the Trainer would use all of them in DataParallel.
    one_gpu = {
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    }
    completed = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, **one_gpu}
    )
    if completed.returncode:
        raise SystemExit(f"{variant}, {case}: {completed.stderr[-2000:]}")
    measured: dict[str, float] = json.loads(completed.stdout.splitlines()[-1])
    return measured


def main(argv: Sequence[str] | None = None) -> int:
    parser = checkout.Parser(description="Compare with transformers' Trainer.")
    parser.add_argument("output", type=Path, nargs="?")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--one")
    arguments = parser.parse_args(argv)
    if arguments.one:
        variant, *case = json.loads(arguments.one)
        compiled = variant != "Trainer"
        is_ours = variant == "ours"
        measured = (
            train_with_suite(*case) if is_ours else train_with_trainer(*case, compiled=compiled)
        )
        print(json.dumps(measured))
        return 0
    on_gpu = torch.cuda.is_available()
    result: dict[str, Any] = {
        "what": "bf16, fused AdamW, one process: ours and transformers' Trainer",
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        **provenance("python -m results.lab.baselines.trainer OUT.json"),
        "cases": {},
    }
    for case in TINY if arguments.tiny else CASES:
        model, batch, length = case
        name = f"{model} {batch} x {length}"
        measurements = {variant: measure(variant, case) for variant in VARIANTS}
        speeds = {
            variant: batch * length / step["step_time_s"] for variant, step in measurements.items()
        }
        ratios = {f"ours / {variant}": speeds["ours"] / speeds[variant] for variant in VARIANTS[1:]}
        result["cases"][name] = {**speeds, **ratios, "steps": measurements}
        shown = ", ".join(f"{ratio:.2f} x {key[7:]}" for key, ratio in ratios.items())
        print(f"{name}: {speeds['ours']:,.0f} tokens/s, {shown}", flush=True)
        write_json(arguments.output, result)
    return 0


if __name__ == "__main__":
    checkout.run(main)
