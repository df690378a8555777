"""GPT-2: what a model family offers (CONTRIBUTING.md). No torch import.

`sizes(folder=None)` gives the named sizes or, with a Hugging Face folder, the one that its
config.json describes; `load` and `save` read and write such a folder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed_training.models.gpt2.huggingface import load as load
from distributed_training.models.gpt2.huggingface import save as save
from distributed_training.models.gpt2.huggingface import sizes as sizes
from distributed_training.models.gpt2.sizes import HUB_IDS as HUB_IDS
from distributed_training.models.size import ModelSize

if TYPE_CHECKING:
    from distributed_training.models.decoder import Decoder


def build(size: ModelSize, *, dropout: float, seed: int) -> Decoder:
    """The model on the CPU in fp32, with random weights that depend on `seed` alone."""
    from distributed_training.models.gpt2.model import build_model

    return build_model(size, dropout=dropout, seed=seed)
