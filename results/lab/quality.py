"""Measure which facts a chat model learns with the preset laptop, and what it forgets.

    python results/lab/quality.py OUT.json MODEL WIKITEXT [-- OPTIONS]

WIKITEXT is a file, such as the validation split of WikiText-2. OPTIONS are given to each run. The
questions are in results/lab/questions.json. None of them is trained on.
"""

import itertools
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import checkout

from distributed_training.records.record import provenance, write_json
from distributed_training.settings.files import ROOT, load_object

SCRIPT = (sys.executable, str(ROOT / "real_model_example.py"))
SEEDS = ("0", "1", "2")
ALL_WEIGHTS = ("--lora_rank", "0", "--learning_rate", "1e-4")
VARIANTS: dict[str, Sequence[str]] = {
    "lora": (),
    "nf4": ("--base_dtype", "nf4"),
    "fp8": ("--base_dtype", "fp8", "--precision", "bf16"),
    "all": ALL_WEIGHTS,
    "bf16-weights": (
        *ALL_WEIGHTS, "--precision", "bf16", "--optimizer", "adamw-bf16-weights",
    ),
}  # fmt: skip


def call(*words: str, text: str = "") -> str:
    """Call a command of the script with `text` as its input. Return its output."""
    result = subprocess.run([*SCRIPT, *words], input=text, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"error: {' '.join(words)}\n{result.stderr[-3000:]}")
    return result.stdout


def ask(model: str, keywords: Mapping[str, str]) -> dict[str, bool]:
    """Return for each question whether the likeliest answer contains one of its keywords, which are
    separated by "|"."""
    out = "\n" + call("generate", model, "--num_tokens", "40", text="\n".join(keywords))
    answers = out.split("\nassistant: ")[1:]
    return {
        question: re.search(rf"\b({words})", answer, re.IGNORECASE) is not None
        for (question, words), answer in zip(keywords.items(), answers, strict=True)
    }


def measure(model: str, wikitext: str) -> dict[str, Any]:
    """Return the questions that a model answers, and its bits per byte of a text."""
    questions = load_object(Path(__file__).with_name("questions.json"), "questions")
    row: dict[str, Any] = {}
    for name, keywords in questions.items():
        is_right = ask(model, keywords)
        row[name] = sum(is_right.values())
        row[f"wrong_{name}"] = [question for question, right in is_right.items() if not right]
    out = call("eval", model, "--dataset", wikitext)
    (bits,) = re.findall(r"bits per byte +([\d.]+)", out)
    return {**row, "bits_per_byte": float(bits)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = checkout.Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="the JSON file to write")
    parser.add_argument("model", help="name or folder of a chat model")
    parser.add_argument("wikitext", help="a text file")
    parser.add_argument("--variants", nargs="*", default=[*VARIANTS], choices=VARIANTS)
    parser.add_argument("options", nargs="*", help="options of each run, after --")
    arguments = parser.parse_args(argv)
    document: dict[str, Any] = provenance(" ".join(sys.argv))
    rows = [{"variant": "before", **measure(arguments.model, arguments.wikitext)}]
    for variant, seed in itertools.product(arguments.variants, SEEDS):
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            call(
                "--preset", "laptop", "--model", arguments.model, "--seed", seed,
                "--output_dir", folder, *VARIANTS[variant], *arguments.options,
            )  # fmt: skip
            row = {"variant": variant, "seed": seed, "run_s": time.monotonic() - began}
            rows.append(row | measure(f"{folder}/latest", arguments.wikitext))
        print(rows[-1], flush=True)
        write_json(arguments.out, {**document, "model": arguments.model, "runs": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
