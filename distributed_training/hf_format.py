"""What a Hugging Face GPT-2 folder must hold, checked without importing torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from distributed_training.errors import UserError
from distributed_training.files import load_json, shown
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
                f"weights {folder}: {key}={shown(config.get(key))} but the model has {value}",
                fix="set model to the size of these weights",
            )
    _check_form(folder, config, size)
    try:
        with safe_open(folder / "model.safetensors", "np"):
            pass  # opening reads the header and compares it with the file's length
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"weights {folder}: model.safetensors cannot be read", str(error), "fetch it again"
        ) from None


def _check_form(folder: Path, config: Mapping[str, Any], size: ModelSize) -> None:
    """The same tensors can make another function: our model computes the published one only."""
    accepted: dict[str, tuple[Any, ...]] = {
        "activation_function": ("gelu_new",),
        "layer_norm_epsilon": (1e-5,),
        "n_inner": (None, 4 * size.hidden_size),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "tie_word_embeddings": (True,),
    }
    for key, values in accepted.items():
        if key in config and config[key] not in values:
            raise UserError(
                f"weights {folder}: {key}={shown(config[key])} but the published GPT-2, which is "
                f"what this suite trains, has {values[-1]!r}",
                fix="give weights of GPT-2's own form, or set weights to auto",
            )
