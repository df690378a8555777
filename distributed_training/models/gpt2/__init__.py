"""GPT-2: what a model family offers (CONTRIBUTING.md), in five functions. No torch import.

`load` and `save`, from and to a folder in Hugging Face's format, are in huggingface.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from distributed_training.models.gpt2.huggingface import load as load
from distributed_training.models.gpt2.huggingface import read_size
from distributed_training.models.gpt2.huggingface import save as save
from distributed_training.models.gpt2.sizes import HUB_IDS as HUB_IDS
from distributed_training.models.gpt2.sizes import SIZES
from distributed_training.models.size import ModelSize

if TYPE_CHECKING:
    from distributed_training.models.decoder import Decoder, Split


def sizes(folder: Path | None = None) -> dict[str, ModelSize]:
    """The named sizes; with a Hugging Face folder, the one that its config.json describes.

    Raises UserError where our GPT-2 does not compute what that config.json describes.
    """
    return SIZES if folder is None else {folder.name: read_size(folder)}


def build(size: ModelSize, *, dropout: float, seed: int) -> Decoder:
    """The model on the CPU in fp32, with random weights that depend on `seed` alone."""
    from distributed_training.models.gpt2.model import build_model

    return build_model(size, dropout=dropout, seed=seed)


def split(model: Decoder) -> Split:
    """What parallelism needs to know of a model, or of a stage of one."""
    return model.split()
