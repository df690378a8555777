"""Measure what a chat model learns and forgets with the preset laptop or short-answers, with three
seeds.

    python results/lab/quality.py OUT.json MODEL TEXT [--preset NAME] [--KEY VALUE ...]

MODEL is SmolLM2-135M-Instruct or its folder. TEXT is a file of general text, such as the validation
split of WikiText-2. All keys are given to each run. No run trains on the questions, which are in
questions.json in this folder. An answer is right if it contains one of the question's keywords. The
model is loaded by transformers, which answers greedily, with at most 40 tokens. For the preset
short-answers, the median number of words of the answers to its validation questions is measured in
place of the facts, with at most 200 tokens.
"""

import json
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from distributed_training.data.corpus import CHATS_DIR
from distributed_training.records.record import load_record, provenance, write_json
from distributed_training.settings.files import ROOT, load_object
from distributed_training.settings.keys import Parser

SEEDS = ("0", "1", "2")
SCRIPT = str(ROOT / "real_model_example.py")
FILES = ("OUT.json", "MODEL", "TEXT")
BATCH_SIZE = 100
QUESTIONS = load_object(Path(__file__).with_name("questions.json"), "questions")


def call(*words: str) -> str:
    """Call a command of the script. Return its output."""
    command = [sys.executable, SCRIPT, *words]
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if result.returncode:
        sys.exit(f"error: {' '.join(words)}\n{result.stderr}")
    return result.stdout


def ask(folder: str, questions: Sequence[str], num_tokens: int = 40) -> list[str]:
    """Return the answers of the model in `folder`, with at most `num_tokens` each."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
    options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    texts: list[str] = []
    for start in range(0, len(questions), BATCH_SIZE):
        batch = questions[start : start + BATCH_SIZE]
        chats = [[{"role": "user", "content": question}] for question in batch]
        prompts: Any = tokenizer.apply_chat_template(chats, padding=True, **options).to(device)
        tokens = model.generate(**prompts, max_new_tokens=num_tokens, do_sample=False)
        answers = tokens[:, prompts["input_ids"].shape[1] :]
        texts += tokenizer.batch_decode(answers, skip_special_tokens=True)
    return texts


def measure(model: str, folder: str, text: str, preset: str) -> dict[str, Any]:
    """Return the number of right answers for each kind of question, all answers, and the bits per
    byte of a text. `folder` holds the model in transformers' form."""
    row: dict[str, Any] = {}
    all_answers: dict[str, str] = {}
    kinds = dict(QUESTIONS)
    if preset == "short-answers":
        del kinds["facts"]
        lines = (CHATS_DIR / preset / "validation.jsonl").read_text().splitlines()
        questions = [json.loads(line)["prompt"] for line in lines]
        all_answers = dict(zip(questions, ask(folder, questions, 200), strict=True))
        row["words"] = round(statistics.median(len(text.split()) for text in all_answers.values()))
    for kind, keywords in kinds.items():
        answers = dict(zip(keywords, ask(folder, list(keywords)), strict=True))
        row[kind] = sum(
            bool(re.search(rf"\b({keywords[question]})", answer, re.IGNORECASE))
            for question, answer in answers.items()
        )
        all_answers |= answers
    printed = call("eval", model, "--dataset", text, "--max_length", "1024")
    row["bits_per_byte"] = float(re.findall(r"bits per byte +([\d.]+)", printed)[0])
    return row | {"answers": all_answers}


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="the JSON file to write")
    parser.add_argument("model", help="name or folder of the chat model")
    parser.add_argument("text", help="a file of general text")
    parser.add_argument("--preset", default="laptop", help="laptop or short-answers")
    arguments, keys = parser.parse_known_args(argv)
    model, preset = arguments.model, arguments.preset
    words = ["python", "results/lab/quality.py", *FILES, "--preset", preset, *keys]
    document = provenance(shlex.join(words))
    rows = {"before": measure(model, model, arguments.text, preset)}
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            call(
                "--preset", preset, "--model", model, "--seed", seed, "--output_dir", folder,
                *keys,
            )  # fmt: skip
            row: dict[str, Any] = {"run_s": round(time.monotonic() - began)}
            memory = load_record(Path(folder) / "latest").memory
            row["peak_host_bytes"] = memory["peak_host_bytes"]
            run = f"{folder}/latest"
            rows[f"seed {seed}"] = row | measure(run, f"{run}/hf", arguments.text, preset)
        print(rows[f"seed {seed}"], flush=True)
        write_json(arguments.out, document | {"runs": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
