"""Compare what `plan --for` says with the peaks that other trainers had on one H100 or H200, and
write both: `python results/lab/trainers.py OUT.json [PYTHON]`.

PYTHON has Liger. The measured runs are in the records and notes that `SOURCES` names."""

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkout

from distributed_training.models import find_model
from distributed_training.predict.rates import gpu_rates
from distributed_training.records.record import provenance
from distributed_training.settings.machine import parse_gpu
from distributed_training.tools.plan_for import estimate_times, trace
from distributed_training.tools.unsloth import estimate_step

GIB = 2**30
WORKSPACE_BYTES = 64 * 2**20  # of cuBLAS on an H100 or H200
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
LIGER = {"use_liger_kernel": True}
CHECKPOINTS = {"gradient_checkpointing": True}
SOURCES = (
    "records/h200-trainer, h100-large, h200-large, h200-torch-2.14, h100-hub, h100-unsloth, "
    "h200-unsloth, and earlier runs whose logs are lost"
)
# Model, batch, length, rank of the adapters, arguments, the peaks of the runs in GiB, and the
# medians of their steps in milliseconds
TRAINER: tuple[Any, ...] = (
    ("gpt2-medium", 4, 512, 0, {}, [9.79], {"H200": 69.35}),
    ("gpt2", 64, 1024, 0, {}, [86.08], {"H200": 405.5}),
    ("Qwen3-0.6B", 8, 1024, 0, {}, [39.36], {"H200": 207.8}),
    ("SmolLM2-135M", 32, 1024, 0, {}, [47.84], {"H200": 220.7}),
    (
        "Llama-3.2-1B",
        4,
        2048,
        0,
        LIGER,
        [29.663, 29.70, 29.663, 29.663, 29.663],
        {"H100-80GB": 204.95, "H200": 180.5},
    ),
    ("Qwen3-0.6B", 8, 1024, 0, LIGER, [20.665, 20.665], {"H100-80GB": 304.4}),
    ("Qwen3-0.6B", 8, 1024, 16, {}, [30.60], {"H100-80GB": 274.9}),
    ("Qwen3-8B", 1, 1024, 16, CHECKPOINTS, [17.80], {"H100-80GB": 508.2}),
    (
        "Llama-3.1-8B",
        1,
        4096,
        16,
        LIGER | CHECKPOINTS,
        [17.573, 17.60, 17.573, 17.60, 17.573],
        {"H100-80GB": 567.6, "H200": 509.9},
    ),
    (
        "Qwen3-8B",
        1,
        1024,
        16,
        LIGER | CHECKPOINTS,
        [16.349, 16.30, 16.349, 16.349],
        {"H100-80GB": 633.55, "H200": 558.9},
    ),
)
# Model, batch, length, dtype of the base, checkpointing, and the peaks
UNSLOTH = (
    ("Llama-3.1-8B", 1, 4096, "bf16", "none", [30.60] * 5 + [30.50] * 6 + [30.57] * 2),
    ("Llama-3.1-8B", 1, 4096, "bf16", "full", [16.70] * 5),
    ("Qwen2.5-7B", 2, 2048, "bf16", "none", [29.10, 29.10, 30.50]),
    ("Qwen3-8B", 2, 2048, "nf4", "full", [7.30, 7.30, 7.30, 7.261, 7.261]),
    ("Qwen3-0.6B", 8, 1024, "bf16", "none", [11.20] * 4),
    ("Llama-3.2-3B", 2, 4096, "bf16", "none", [24.10]),
    ("Qwen3-4B", 4, 2048, "nf4", "full", [4.60, 4.204, 4.204, 4.204]),
    ("Qwen3-14B", 2, 2048, "nf4", "full", [11.57, 11.57]),
)  # fmt: skip


def read_document(model: str) -> dict[str, Any]:
    spec = find_model(model)
    document: dict[str, Any] = spec.code.to_config(spec.size, 0)
    return document | (NO_DROPOUT if spec.family == "gpt2" else {})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("python", nargs="?", default=sys.executable)
    arguments = parser.parse_args()
    rows = []

    def add(trainer: str, name: str, answer: dict[str, Any], measured: list[float]) -> None:
        said = (answer["sizes"]["peak"] + WORKSPACE_BYTES) / GIB
        print(trainer, name, f"{said:.2f}", measured, flush=True)
        row = {"trainer": trainer, "settings": name, "GiB": round(said, 3), "measured": measured}
        rows.append(row | {"versions": answer["versions"]})

    for model, batch, length, dtype, mode, measured in UNSLOTH:
        values: dict[str, Any] = {"batch_size": batch, "max_length": length, "grad_accum_steps": 1}
        values |= {"lora_rank": 16, "base_dtype": dtype, "activation_checkpointing": mode}
        config: Any = SimpleNamespace(**values)
        answer = estimate_step(read_document(model), config, 79 * GIB)
        add("Unsloth", f"{model} LoRA {batch} x {length}, {dtype}, {mode}", answer, measured)
    for model, batch, length, rank, options, measured, times_ms in TRAINER:
        question = {
            "class": "Trainer",
            "config": read_document(model),
            "dtype": "bfloat16" if rank else "float32",
            "lora": {"r": rank, "target_modules": "all-linear"} if rank else None,
            "nf4": None,
            "length": length,
            "arguments": {"per_device_train_batch_size": batch, "bf16": True, **options},
        }
        trainer = " + ".join(
            ["Trainer"] + ["PEFT"] * bool(rank) + ["Liger"] * ("use_liger_kernel" in options)
        )
        name = f"{model}{' LoRA' if rank else ''} {batch} x {length}"
        answer = trace(question, arguments.python)
        add(trainer, name, answer, measured)
        rows[-1]["seconds"] = {
            gpu: [*estimate_times(answer["sizes"], gpu_rates(parse_gpu(gpu)))[0], time_ms / 1e3]
            for gpu, time_ms in times_ms.items()
        }
    document = provenance("python results/lab/trainers.py OUT.json")
    document |= {"sources": SOURCES, "rows": rows}
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    checkout.run(main)
