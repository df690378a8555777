"""GPT-2 in six sizes over the small vocabulary, for scaling_law.py: a model family."""

from __future__ import annotations

from pathlib import Path

from distributed_training.models import ModelSize, gpt2
from distributed_training.models.gpt2 import build, gpt2_size, load, save

__all__ = ["build", "load", "save", "sizes"]

SHAPES = {  # blocks, width; heads of 32
    "0.1M": (2, 32), "0.3M": (2, 64), "1M": (4, 128), "3M": (6, 192), "10M": (8, 320),
    "30M": (10, 480),
}  # fmt: skip


def sizes(folder: Path | None = None) -> dict[str, ModelSize]:
    """By name; with a Hugging Face folder, what that describes."""
    if folder is not None:
        return gpt2.sizes(folder)
    return {
        name: gpt2_size(
            vocab_size=2048, num_positions=256, num_layers=layers, num_heads=width // 32,
            hidden_size=width,
        )
        for name, (layers, width) in SHAPES.items()
    }  # fmt: skip
