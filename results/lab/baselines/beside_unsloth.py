"""Train the same adapters with this suite and with Unsloth in turns, on one GPU.

    python -m results.lab.baselines.beside_unsloth OUT.json Llama-3.1-8B 1 4096 --turns 3

Each turn starts one process of ours and then one of Unsloth's. Steps have one micro-batch, weights
and tokens are random, and both train LoRA 16 on all matrices. The record contains the median step
time and the peak allocated memory of each process, and the ratio of each turn. Unsloth needs older
packages than this suite, so `--unsloth_python` names the interpreter of its own environment.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from distributed_training.records.record import RECORD_FILE, load_record, provenance, write_json
from distributed_training.settings.files import ROOT

NUM_STEPS = 45  # The record's median leaves out the first 5.


def run_ours(args: argparse.Namespace) -> dict[str, Any]:
    """Train with this suite. Return the measurements and the prediction."""
    options: dict[str, object] = {
        "strategy": "dp", "model": args.model, "weights": "random",
        "dataset": "embedded", "tokenizer": "embedded", "batch_size": args.batch,
        "max_length": args.length, "lora_rank": 16, "lora_alpha": 32,
        "activation_checkpointing": args.mode, "max_steps": NUM_STEPS, "eval_samples": 2,
        "checkpoint_every": 0, "export": False, "generate": None,
    }  # fmt: skip
    options |= {"lora_targets": args.targets} if args.targets else {}
    options |= {"base_dtype": "nf4"} if args.nf4 else {}
    options |= {"checkpointed_blocks": args.blocks} if args.blocks else {}
    return train(options)


def train(options: dict[str, object]) -> dict[str, Any]:
    """Train with this suite. Return the measurements and the prediction."""
    words = [str(word) for key, value in options.items() for word in (f"--{key}", value)]
    with tempfile.TemporaryDirectory() as folder:
        script = str(ROOT / "real_model_example.py")
        command = [sys.executable, script, *words, "--output_dir", folder]
        subprocess.run(command, check=True, stdout=sys.stderr)
        record = load_record(next(Path(folder).glob(f"*/{RECORD_FILE}")).parent)
    memory: Any = record.memory
    performance: Any = record.performance
    predicted: Any = record.prediction
    return {
        "ms": 1e3 * performance["step_time_s"]["p50"],
        "GiB": memory["peak_allocated_bytes"] / 2**30,
        "predicted ms": 1e3 * predicted["step_time_s"],
        "predicted GiB": predicted["peak_bytes"] / 2**30,
    }


def run_unsloth(args: argparse.Namespace) -> dict[str, Any]:
    """Train with Unsloth, and return the measurements."""
    command = [args.unsloth_python, "-m", "results.lab.baselines.unsloth", args.model]
    command += [str(args.batch), str(args.length), "--checkpointing", args.checkpointing]
    command += ["--nf4"] * args.nf4 + ["--tokenizer", args.tokenizer]
    command += ["--targets", args.targets] if args.targets else []
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout
    return json.loads(output.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("model", help="a Llama's name, or a folder with a config.json")
    parser.add_argument("batch", type=int)
    parser.add_argument("length", type=int)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--mode", default="none", help="our activation_checkpointing")
    parser.add_argument("--blocks", help="our checkpointed_blocks")
    parser.add_argument("--checkpointing", default="none", help="Unsloth's: none, unsloth or full")
    parser.add_argument("--nf4", action="store_true")
    parser.add_argument(
        "--targets", help="matrices with adapters, with commas; default: all of ours"
    )
    parser.add_argument("--tokenizer", default="gpt2", help="for Unsloth: a name or a folder")
    parser.add_argument("--unsloth_python", default=sys.executable)
    parser.add_argument("--git_commit", help="commit hash, for checkouts without a .git folder")
    args = parser.parse_args()
    command = shlex.join(["python", *sys.argv])
    turns = []
    for _ in range(args.turns):
        ours, unsloth = run_ours(args), run_unsloth(args)
        turns.append({"ours": ours, "Unsloth": unsloth, "ratio": unsloth["ms"] / ours["ms"]})
        ratios = sorted(turn["ratio"] for turn in turns)
        summary = {"median": statistics.median(ratios), "lowest": ratios[0], "highest": ratios[-1]}
        origin = provenance(command, commit=args.git_commit)
        write_json(args.out, {**origin, "ratio": summary, "turns": turns})


if __name__ == "__main__":
    main()
