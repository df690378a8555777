"""Compare `plan --for` with runs of Trainer and of TRL's SFTTrainer on one GPU.

    python -m results.lab.baselines.beside_plan predict OUT.json [PYTHON]      before any run
    python -m results.lab.baselines.beside_plan measure OUT.json [ROW ...]     on the GPU
    python -m results.lab.baselines.beside_plan correct OUT.json [PYTHON]      after changes to plan

Each row is a YAML file of that trainer. Weights and tokens are random, and each row is measured in
a process of its own: median seconds of a step, and the bytes that PyTorch allocated and reserved at
most while training. `--cap` also trains with only as much memory as the prediction says, to see
whether that is enough. PYTHON has trl, liger-kernel, peft and bitsandbytes.
"""

import argparse
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from distributed_training.models import find_model
from distributed_training.records.record import provenance, write_json
from distributed_training.settings.files import ROOT

WARM_UP, MEASURED = 4, 8
LORA = {"use_peft": True, "lora_r": 16, "lora_alpha": 32, "lora_target_modules": "all-linear"}
BF16 = {"dtype": "bfloat16"}
NF4 = {**LORA, **BF16, "load_in_4bit": True, "optim": "adamw_8bit"}
DOUBLE = {"use_bnb_nested_quant": True}
DROPOUT = {"lora_dropout": 0.05}  # TRL's default: `build_trainer` sets it for Trainer as well
KEPT, DROPPED = {"gradient_checkpointing": False}, {"gradient_checkpointing": True}
LIGER = {"use_liger_kernel": True}
# Trainer, model, batch, length, its other keys. Rows in VARYING also have shorter sequences.
ROWS: dict[str, tuple[str, str, int, int, dict[str, Any]]] = {
    "sft-8b-lora": ("trl", "Llama-3.1-8B", 1, 4096, LORA | BF16),
    "sft-0.6b": ("trl", "Qwen3-0.6B", 8, 1024, {}),
    "sft-8b-nf4": ("trl", "Llama-3.1-8B", 2, 2048, NF4),
    "sft-1b-liger": ("trl", "Llama-3.2-1B", 8, 1024, LIGER),
    "sft-1.7b-8bit": ("trl", "Qwen3-1.7B", 4, 2048, BF16 | KEPT | {"optim": "adamw_8bit"}),
    "sft-3b-lora": ("trl", "Llama-3.2-3B", 4, 1024, LORA | KEPT),
    "sft-4b-8bit": ("trl", "Qwen3-4B", 1, 1024, BF16 | {"optim": "adamw_8bit"}),
    "sft-0.5b": ("trl", "Qwen2.5-0.5B", 8, 2048, LIGER | KEPT),
    "8b-nf4": ("trainer", "Qwen3-8B", 1, 4096, NF4 | DROPOUT | DOUBLE | DROPPED),
    "7b-nf4": ("trainer", "Mistral-7B-v0.3", 4, 1024, NF4 | DROPOUT | DROPPED | LIGER),
    "3b-lora": ("trainer", "Llama-3.2-3B", 2, 2048, LORA | DROPOUT | BF16),
    "4b-lora-liger": ("trainer", "Qwen3-4B", 4, 1024, LORA | DROPOUT | BF16 | LIGER),
    "1.7b": ("trainer", "SmolLM2-1.7B", 4, 2048, DROPPED | {"optim": "adamw_torch"}),
    "medium": ("trainer", "gpt2-medium", 16, 1024, {}),
    "7b-lora-long": ("trainer", "Qwen2.5-7B", 1, 8192, LORA | DROPOUT | BF16 | DROPPED | LIGER),
    "14b-lora": ("trainer", "Qwen3-14B", 1, 2048, LORA | DROPOUT | BF16 | DROPPED),
}  # fmt: skip
VARYING = ("sft-1b-liger", "sft-4b-8bit", "sft-8b-nf4")


def write_yaml(row: str, folder: Path) -> Path:
    """Write a row as a file of its trainer."""
    _, model, batch, length, keys = ROWS[row]
    document = {"model_name_or_path": model, "per_device_train_batch_size": batch}
    file = folder / f"{row}.yaml"
    file.write_text(yaml.safe_dump({**document, "max_length": length, **keys}))
    return file


def predict(row: str, python: str) -> dict[str, Any]:
    """Return what `plan --for` says of a row."""
    with tempfile.TemporaryDirectory() as folder:
        file = write_yaml(row, Path(folder))
        command = [sys.executable, str(ROOT / "real_model_example.py"), "plan", "--json"]
        command += ["--for", ROWS[row][0], str(file), "--cluster", "h200", "--python", python]
        answer = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    keys = (
        "step_time_s",
        "memory_bytes",
        "peak_bytes",
        "needed_bytes",
        "versions",
        "settings",
        "unknown_keys",
    )
    return {key: answer[key] for key in keys}


def load_model(name: str, keys: dict[str, Any], folder: str) -> Any:
    """Return a model with random weights on the GPU, as that trainer would load it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

    spec = find_model(name)
    config = AutoConfig.for_model(**spec.code.to_config(spec.size, 0))
    with torch.device("cuda"):
        dtype = getattr(torch, keys.get("dtype", "float32"))
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if not keys.get("load_in_4bit"):
        return model
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype,
        bnb_4bit_use_double_quant=keys.get("use_bnb_nested_quant", False),
    )  # fmt: skip
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, quantization_config=quantization, device_map={"": 0}
    )


def build_trainer(row: str, folder: str) -> Any:
    """Return the trainer of a row, with random tokens."""
    import trl
    from datasets import Dataset
    from peft import get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoTokenizer, Trainer, TrainingArguments

    kind, name, batch, length, keys = ROWS[row]
    arguments_class = trl.SFTConfig if kind == "trl" else TrainingArguments
    parser = trl.TrlParser((arguments_class, trl.ModelConfig))
    options = dict(keys, per_device_train_batch_size=batch, output_dir=f"{folder}/out")
    options |= {"max_steps": WARM_UP + MEASURED, "report_to": "none", "save_strategy": "no"}
    options |= {"max_length": length} if kind == "trl" else {"bf16": True}
    arguments, model_arguments = parser.parse_dict(options)
    model = load_model(name, keys, folder)
    lora = trl.get_peft_config(model_arguments)
    generator = random.Random(0)
    lengths = [length] * (batch * arguments.max_steps)
    if row in VARYING:
        lengths = [generator.randint(length // 2, length) for _ in lengths]
    ids = [generator.choices(range(30_000), k=size) for size in lengths]
    data = Dataset.from_dict({"input_ids": ids, "labels": ids})
    if kind == "trl":
        from distributed_training.data.tokenizer import EMBEDDED_DIR

        tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_DIR)
        return trl.SFTTrainer(
            model, arguments, train_dataset=data, processing_class=tokenizer, peft_config=lora
        )
    if lora:
        checkpoints = arguments.gradient_checkpointing
        if keys.get("load_in_4bit"):
            model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=checkpoints)
        model = get_peft_model(model, lora)
        if checkpoints:
            model.enable_input_require_grads()
    return Trainer(model, arguments, train_dataset=data)


def measure(row: str, cap_bytes: int | None) -> dict[str, Any]:
    """Train a row in this process. Return its times and peaks."""
    import torch
    from transformers import TrainerCallback

    ends: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: object, **__: object) -> None:
            torch.cuda.synchronize()
            ends.append(time.perf_counter())

    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.exists() else None) as folder:
        trainer = build_trainer(row, folder)
        trainer.add_callback(Clock())
        torch.cuda.empty_cache()
        if cap_bytes:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(cap_bytes / total)
        torch.cuda.reset_peak_memory_stats()  # Loading is not part of training.
        trainer.train()
    times = [end - begin for begin, end in itertools.pairwise(ends)][WARM_UP - 1 :]
    parameters = {
        f"{('frozen', 'trained')[p.requires_grad]} {p.dtype}" for p in trainer.model.parameters()
    }
    return {
        "step_time_s": statistics.median(times),
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "dtypes": sorted(parameters),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["predict", "measure", "row", "correct"])
    parser.add_argument("out", type=Path)
    parser.add_argument("words", nargs="*", help="PYTHON, or names of rows to measure")
    parser.add_argument("--cap", type=int, help="bytes that PyTorch may reserve")
    args = parser.parse_args()
    if args.action == "row":
        result = measure(args.words[0], args.cap)
        print(json.dumps(result))
        return
    command = "python -m results.lab.baselines.beside_plan predict OUT.json, then measure OUT.json"
    if args.action == "predict":
        document: Any = provenance(command) | {"rows": {}}
        for row, (trainer, model, batch, length, keys) in ROWS.items():
            settings = {"trainer": trainer, "model": model, "batch": batch, "length": length}
            predicted = predict(row, *(args.words or [sys.executable]))
            document["rows"][row] = {**settings, "keys": keys, "predicted": predicted}
            print(row, f"{predicted['peak_bytes'] / 2**30:.3f} GiB", flush=True)
            write_json(args.out, document)
        return
    document = json.loads(args.out.read_text())
    if args.action == "correct":
        for row, entry in document["rows"].items():
            entry["corrected"] = predict(row, *(args.words or [sys.executable]))
        write_json(args.out, document)
        return
    for row in args.words or ROWS:
        entry = document["rows"][row]
        run = [sys.executable, "-m", "results.lab.baselines.beside_plan", "row", str(args.out), row]
        cap = ["--cap", str(args.cap)] * bool(args.cap)
        done = subprocess.run([*run, *cap], capture_output=True, text=True, cwd=ROOT)
        lines = (done.stderr if done.returncode else done.stdout).splitlines()
        if done.returncode:
            print(row, *lines[-3:], flush=True)
            continue
        entry["measured"] = json.loads(lines[-1])
        entry["measured"]["versions"] = {
            name: metadata.version(name) for name in ("torch", "transformers", "trl", "peft")
        }
        share = entry["predicted"]["peak_bytes"] / entry["measured"]["allocated_bytes"] - 1
        print(row, f"{share:+.1%}", json.dumps(entry["measured"]), flush=True)
        write_json(args.out, document)


if __name__ == "__main__":
    main()
