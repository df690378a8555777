"""Tune the same adapters on pairs of answers with this suite and with TRL in turns, on one GPU.

    python -m results.lab.baselines.beside_trl OUT.json Qwen3-4B --pairs 4 --length 1024

Weights are random, both programs train LoRA 16 on all matrices with DPO, and both compute the
reference's log-probabilities before the first step. Each answer has as many tokens as fit with its
prompt into `length`, so nobody pads. Each row is a process of its own: the record has the median
step time and the peak that PyTorch allocated while training, and each turn's ratio of pairs per
second against TRL's fastest setting with the same checkpointing. Needs trl and liger-kernel.
"""

import argparse
import json
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from distributed_training.data.tokenizer import EMBEDDED_DIR
from distributed_training.records.record import provenance, write_json
from distributed_training.settings.files import ROOT
from results.lab.baselines.beside_unsloth import train
from results.lab.baselines.unsloth import MATRICES, MEASURED, WARM_UP, save_random_model, time_steps

NUM_PROMPT_TOKENS = 64
SETTINGS = {"none": ("TRL", "TRL, Liger"), "full": ("TRL, Liger, checkpointing",)}


def write_pairs(path: Path, count: int, length: int) -> None:
    """Write pairs whose sequences have `length` tokens with the embedded tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_DIR)
    tokens = (str(tokenizer.decode([index])) for index in range(len(tokenizer)))
    words = [token for token in tokens if token[0] == " " and token[1:].isalpha()]
    generator = random.Random(0)

    def text(num_tokens: int) -> str:
        return "".join(generator.choices(words, k=num_tokens))

    num_answer = length - NUM_PROMPT_TOKENS - 1  # and the end of the text
    with path.open("w") as file:
        for _ in range(count):
            texts = (NUM_PROMPT_TOKENS, num_answer, num_answer)
            keys = ("prompt", "chosen", "rejected")
            row = dict(zip(keys, map(text, texts), strict=True))
            file.write(json.dumps(row) + "\n")


def run_ours(args: argparse.Namespace, pairs: Path, checkpointing: str) -> dict[str, Any]:
    """Train with this suite. Return the measurements and the prediction."""
    options: dict[str, object] = {
        "strategy": "dp", "model": args.model, "weights": "random", "dataset": pairs,
        "tokenizer": "embedded", "preference": "dpo", "batch_size": args.pairs,
        "max_length": 2 * args.length, "lora_rank": 16, "lora_alpha": 32, "num_samples": -1,
        "activation_checkpointing": checkpointing, "max_steps": WARM_UP + MEASURED,
        "eval_samples": args.pairs, "checkpoint_every": 0, "export": False, "generate": "none",
    }  # fmt: skip
    return train(options)


def run_trl(args: argparse.Namespace, pairs: Path, setting: str) -> dict[str, Any]:
    """Train with TRL in a process of its own, and return the measurements."""
    command = [sys.executable, "-m", "results.lab.baselines.beside_trl", str(args.out), args.model]
    command += ["--pairs", str(args.pairs), "--length", str(args.length)]
    command += ["--trl", setting, "--file", str(pairs)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout
    return json.loads(output.splitlines()[-1])


def measure_trl(args: argparse.Namespace, folder: Path) -> None:
    """Train with TRL for some steps, and print what they took."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    save_random_model(args.model, str(EMBEDDED_DIR), folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.to("cuda")  # type: ignore[arg-type]
    checkpointing = "checkpointing" in args.trl
    config = DPOConfig(
        output_dir=str(folder / "out"), per_device_train_batch_size=args.pairs, bf16=True,
        max_steps=WARM_UP + MEASURED, max_length=args.length, optim="adamw_torch_fused",
        precompute_ref_log_probs=True, use_liger_kernel="Liger" in args.trl, report_to="none",
        save_strategy="no", logging_strategy="no", gradient_checkpointing=checkpointing,
    )  # fmt: skip
    trainer = DPOTrainer(
        model=model, args=config, processing_class=AutoTokenizer.from_pretrained(folder),
        train_dataset=Dataset.from_json(str(args.file)),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=MATRICES.split(",")),
    )  # fmt: skip
    versions = {package: metadata.version(package) for package in ("torch", "trl", "liger-kernel")}
    print(json.dumps(time_steps(trainer) | {"versions": versions}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("model", help="a listed name, or a folder with a config.json")
    parser.add_argument("--pairs", type=int, default=4, help="pairs of a step")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a prompt with answer")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--modes", default="none", help="our activation_checkpointing, with commas")
    parser.add_argument("--git_commit", help="commit hash, for checkouts without a .git folder")
    parser.add_argument("--trl", help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.trl:
            measure_trl(args, folder)
            return
        args.out.parent.mkdir(parents=True, exist_ok=True)  # before minutes of measuring
        pairs = folder / "pairs.jsonl"
        write_pairs(pairs, args.pairs * (WARM_UP + MEASURED + 1), args.length)
        command = shlex.join(["python", *sys.argv])
        turns: list[dict[str, Any]] = []
        for _ in range(args.turns):
            for mode in args.modes.split(","):
                rows = {"ours": run_ours(args, pairs, mode)}
                rows |= {setting: run_trl(args, pairs, setting) for setting in SETTINGS[mode]}
                best = min(rows[setting]["ms"] for setting in SETTINGS[mode])
                turns.append({"mode": mode, "rows": rows, "ratio": best / rows["ours"]["ms"]})
                origin = provenance(command, commit=args.git_commit)
                ratios = {
                    key: statistics.median(turn["ratio"] for turn in turns if turn["mode"] == key)
                    for key in {turn["mode"] for turn in turns}
                }
                write_json(args.out, {**origin, "ratios": ratios, "turns": turns})


if __name__ == "__main__":
    main()
