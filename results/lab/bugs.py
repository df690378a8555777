"""Publish what `parity` says to bugs that others have published, and to the correct code.

    python results/lab/bugs.py NAME ...    runs some bugs of bugs.toml again (default: all)

Each bug is applied to a copy of the last commit. The record also contains all rows of the same
comparisons of the correct copy, and of those in CORRECT. `make docs` writes results/BUGS.md."""

import json
import random
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import checkout

from distributed_training.records.record import provenance
from distributed_training.settings.files import ROOT, load_json

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RECORD = ROOT / "results/records/cpu-bugs/rows.json"
COMMON = (
    "--num_gpus 2 --model gpt2-tiny --dataset embedded --max_length 32 --batch_size 4 "
    "--num_samples 64 --max_steps 8 --eval_samples 8 --learning_rate 1e-3"
)
# Comparisons of correct code only, under all strategies
CORRECT = (
    "--dataset RECORDS --pack True",
    "--dataset RECORDS --pack False --grad_accum_steps 2",
    "--lora_rank 4 --dataset RECORDS",
    "--num_samples 22 --epochs 2",
    "--model MODERN --weights random --dataset RECORDS",
    "--model MIXTURE --weights random",
    "--grad_accum_steps 2",
    "--max_length 64 --lr_schedule constant",
    "--grad_accum_steps 4 --max_grad_norm 0.05",
    "--model MODERN --weights random --lora_rank 4 --dataset RECORDS --pack True",
    "--activation_checkpointing full --weight_decay 0.1 --max_grad_norm 0.1",
)
DRIVER = """
import json, runpy, sys
from distributed_training.tools import parity
judge = parity.judge

def record(trial, reference, rounding):
    judge(trial, reference, rounding)
    excess = None
    if trial.differences and trial is not rounding:  # largest difference / tolerance
        excess = max(
            difference / max(limit, parity.ROUNDING_FACTOR * (
                rounding.differences[quantity].get(name, 0.0) if quantity == "weights"
                else max(rounding.differences[quantity].values())))
            for quantity, limit in parity.LIMITS.items()
            for name, difference in trial.differences[quantity].items()
        )
    print("ROW", json.dumps([trial.name, trial.verdict, excess, trial.why]), flush=True)

parity.judge = record
sys.argv[:1] = ["real_model_example.py", "parity"]
runpy.run_path("real_model_example.py", run_name="__main__")
"""


def write_inputs(folder: Path) -> dict[str, str]:
    """Write records of very different lengths and two tiny models of transformers. Return their
    paths by the word that stands for them in options."""
    from transformers import Qwen3Config, Qwen3MoeConfig

    draw = random.Random(0)
    rows = []
    for _ in range(400):
        words = [draw.choice(("red", "green", "blue", "seven")) for _ in range(30)]
        answer = " ".join(words[: draw.choice((1, 2, 4, 9, 20))])
        rows.append(json.dumps({"prompt": f"{words[0]}?", "completion": f" {answer}"}))
    (folder / "records.jsonl").write_text("\n".join(rows))
    shape: dict[str, Any] = {
        "vocab_size": 2048, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 96, "tie_word_embeddings": True,
    }  # fmt: skip
    experts: dict[str, Any] = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    }
    Qwen3Config(**shape).save_pretrained(folder / "modern")
    Qwen3MoeConfig(**shape, **experts).save_pretrained(folder / "mixture")
    names = {"RECORDS": "records.jsonl", "MODERN": "modern", "MIXTURE": "mixture"}
    return {word: str(folder / name) for word, name in names.items()}


def run_parity(copy: Path, options: str, inputs: dict[str, str]) -> dict[str, Any]:
    """Run `parity` in a copy of the suite. Return its exit code and the rows of its table, each
    (layout, verdict, largest difference / tolerance, reason)."""
    for word, path in inputs.items():
        options = options.replace(word, path)
    words = shlex.split(f"{COMMON} {options} --tokenizer embedded")
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-c", DRIVER, *words, "--out", out]
        result = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    lines = result.stdout.splitlines()
    rows = [json.loads(line[4:]) for line in lines if line.startswith("ROW ")]
    if len(rows) < 3:
        print(result.stdout[-2000:], result.stderr[-2000:])
    return {"exit_code": result.returncode, "rows": rows}


def main() -> int:
    names = sys.argv[1:]
    bugs = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["bug"]
    document: dict[str, Any] = {"bugs": {}, "correct": {}}
    if names and RECORD.is_file():
        document = load_json(RECORD, "record")
    with tempfile.TemporaryDirectory() as folder:
        inputs = write_inputs(Path(folder))
        copy = Path(folder) / "copy"
        copy.mkdir()
        archive = subprocess.check_output(["git", "archive", "HEAD"], cwd=ROOT)
        subprocess.run(["tar", "x"], input=archive, cwd=copy, check=True)
        chosen = [bug for bug in bugs if "file" in bug and bug["name"] in (names or bug["name"])]
        options = dict.fromkeys([*(bug["options"] for bug in bugs if "file" in bug), *CORRECT])
        for option in [name for name in options if not names or name in names]:
            document["correct"][option] = run_parity(copy, option, inputs)
            print(option, document["correct"][option], flush=True)
        for bug in chosen:
            path = copy / bug["file"]
            correct = path.read_text()
            assert correct.count(bug["old"]) == 1, bug["name"]
            path.write_text(correct.replace(bug["old"], bug["new"]))
            document["bugs"][bug["name"]] = run_parity(copy, bug["options"], inputs)
            path.write_text(correct)
            print(bug["name"], document["bugs"][bug["name"]], flush=True)
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    document |= provenance("python results/lab/bugs.py")
    RECORD.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    checkout.run(main)
