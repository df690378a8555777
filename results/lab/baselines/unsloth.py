"""Measure Unsloth's LoRA on one GPU, with random weights and random tokens.

    python -m results.lab.baselines.unsloth Llama-3.1-8B 1 4096 --checkpointing none

Needs unsloth, trl and, for --nf4, bitsandbytes. The adapters are those of `--lora_rank 16` and
`--lora_alpha 32`.
Prints, as JSON, the median milliseconds per step and the peak memory that PyTorch allocated.
beside_unsloth.py runs it in turns with this suite.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from distributed_training.models import find_model

MATRICES = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
WARM_UP, MEASURED = 6, 18


def save_random_model(name: str, tokenizer: str, folder: Path) -> None:
    """Save a model of transformers with random bf16 weights, and GPT-2's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.for_model(**find_model(name).size.config["document"])
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokens = AutoTokenizer.from_pretrained(tokenizer)
    tokens.pad_token = tokens.eos_token
    tokens.save_pretrained(folder)


def time_steps(trainer: Any) -> dict[str, float]:
    """Train. Return the median milliseconds per step and the peak memory in GiB."""
    import torch
    from transformers import TrainerCallback

    ends: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: object, **__: object) -> None:
            torch.cuda.synchronize()
            ends.append(time.perf_counter())

    trainer.add_callback(Clock())
    torch.cuda.reset_peak_memory_stats()  # Loading is not part of training.
    trainer.train()
    times = zip(ends[WARM_UP:], ends[WARM_UP + 1 :], strict=False)
    seconds = statistics.median(end - begin for begin, end in times)
    return {"ms": 1e3 * seconds, "GiB": torch.cuda.max_memory_allocated() / 2**30}


def measure(args: argparse.Namespace, folder: Path) -> None:
    """Train for some steps, and print what they took."""
    import torch
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer
    from unsloth import FastLanguageModel

    checkpointing = {"none": False, "unsloth": "unsloth", "full": True}[args.checkpointing]
    model, tokenizer = FastLanguageModel.from_pretrained(
        str(folder), max_seq_length=args.length, dtype=torch.bfloat16, load_in_4bit=args.nf4
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=16,
        lora_alpha=32,
        target_modules=args.targets.split(","),
        use_gradient_checkpointing=checkpointing,
    )
    num_steps = WARM_UP + MEASURED
    ids = torch.randint(50_000, (num_steps * args.batch, args.length)).tolist()
    config = SFTConfig(
        output_dir=str(folder / "out"), per_device_train_batch_size=args.batch, bf16=True,
        gradient_accumulation_steps=1,  # Unsloth's default is 2.
        max_steps=num_steps, max_length=args.length, optim="adamw_torch_fused", report_to="none",
        save_strategy="no", logging_strategy="no", gradient_checkpointing=bool(checkpointing),
    )  # fmt: skip
    data = Dataset.from_dict({"input_ids": ids, "labels": ids})
    trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=data, args=config)
    versions = {package: metadata.version(package) for package in ("torch", "unsloth", "trl")}
    print(json.dumps(time_steps(trainer) | {"versions": versions}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a Llama's name, or a folder with a config.json")
    parser.add_argument("batch", type=int)
    parser.add_argument("length", type=int)
    parser.add_argument("--checkpointing", choices=["none", "unsloth", "full"], default="none")
    parser.add_argument("--nf4", action="store_true")
    parser.add_argument("--targets", default=MATRICES, help="matrices with adapters, with commas")
    parser.add_argument("--tokenizer", default="gpt2")
    args = parser.parse_args()
    os.environ["UNSLOTH_DISABLE_STATISTICS"] = "1"
    import unsloth  # noqa: F401, changes transformers, peft and trl and must come before them

    with tempfile.TemporaryDirectory() as folder:
        save_random_model(args.model, args.tokenizer, Path(folder))
        measure(args, Path(folder))


if __name__ == "__main__":
    main()
