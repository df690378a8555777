"""A model family outside the package: RMSNorm, no biases, rotary positions, a gated MLP."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from distributed_training.models import ModelSize


def _size(num_layers: int, *, tied: bool = True) -> ModelSize:
    """Its MLP has 2 D hidden units, each with a gate; its output layer is tied, or not."""
    d = 32
    return ModelSize(
        vocab_size=2048,
        num_positions=128,
        num_layers=num_layers,
        num_heads=4,
        hidden_size=d,
        block_matrices=((3 * d, d), (d, d), (4 * d, d), (d, 2 * d)),  # attention, MLP
        block_parameters=10 * d**2 + 2 * d,
        block_parameters_split=10 * d**2,
        block_norm_parameters=2 * d,
        final_norm_parameters=d,
        tied=tied,
    )


def sizes(folder: Path | None = None) -> dict[str, ModelSize]:
    if folder is not None:
        shape = json.loads((folder / "config.json").read_text())
        shape["block_matrices"] = tuple(map(tuple, shape["block_matrices"]))
        return {folder.name: ModelSize(**shape)}
    return {"six": _size(6), "untied": _size(6, tied=False)}


def build(size, *, dropout, seed):
    from .model import Rotary, build_decoder

    return build_decoder(lambda: Rotary(size, dropout=dropout), seed, lambda name: 0.05)


def load(model, folder):
    from safetensors.torch import load_file

    model.load_state_dict(load_file(folder / "model.safetensors"))


def save(state, size, folder, *, eos_token_id):
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(asdict(size)))
