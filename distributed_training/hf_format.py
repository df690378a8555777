"""What a Hugging Face GPT-2 folder must hold, checked without importing torch."""

from __future__ import annotations

from pathlib import Path

from distributed_training.config import load_json
from distributed_training.errors import UserError
from distributed_training.sizes import ModelSize


def check_hf_folder(folder: Path, size: ModelSize) -> None:
    """Raise UserError unless `folder` is a Hugging Face GPT-2 folder of exactly this size."""
    config_file = folder / "config.json"
    if not config_file.is_file() or not (folder / "model.safetensors").is_file():
        raise UserError(
            f"weights={str(folder)!r} is not a Hugging Face model folder",
            "config.json and model.safetensors are expected in it",
            "give the hf/ folder of an earlier run, or set weights to auto",
        )
    config = load_json(config_file, "weights")
    if not isinstance(config, dict) or config.get("model_type") != "gpt2":
        raise UserError(f"weights {folder}: config.json is not a GPT-2's", "model_type is not gpt2")
    expected = {
        "vocab_size": size.vocab_size,
        "n_positions": size.num_positions,
        "n_layer": size.num_layers,
        "n_head": size.num_heads,
        "n_embd": size.hidden_size,
    }
    for key, value in expected.items():
        if config.get(key) != value:
            raise UserError(
                f"weights {folder}: {key}={config.get(key)} but the model has {value}",
                fix="set model to the size of these weights",
            )
