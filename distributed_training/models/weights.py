"""Weights in Hugging Face's format: one file of tensors, or several with an index."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from distributed_training.models import ModelSize, weight_files
from distributed_training.models.decoder import Decoder
from distributed_training.settings.errors import UserError


def load_weights(model: Decoder, family: Any, folder: Path) -> None:
    """Copy the weights in `folder` into `model`, in fp32; raise UserError where they do not fit."""
    files: list[Any] = [safe_open(file, "pt") for file in weight_files(folder)]
    stored = {name: file for file in files for name in file.keys()}  # noqa: SIM118, no dict
    for ours, values in model.state_dict().items():
        transposed = family.STORES_TRANSPOSED and ours.startswith("blocks.")
        for name, part in family.to_hf(ours, values, model.size).items():
            rest = values.shape[1:]
            shape = [part.numel() // math.prod(rest), *rest]
            if transposed:
                shape.reverse()
            if name not in stored:  # as of a model that was saved without its output layer
                name = name.partition(".")[2]
            tensor = stored[name].get_tensor(name) if name in stored else None
            if tensor is None or list(tensor.shape) != shape or not tensor.is_floating_point():
                found = "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
                why = f"{name} ({ours} here) is {found} and should be a float {shape}"
                raise UserError(f"weights {folder}: shapes differ", why)
            rows = tensor.t() if transposed else tensor
            part.copy_(rows.reshape(part.shape))


def save_weights(
    state: dict[str, torch.Tensor], family: Any, size: ModelSize, folder: Path, eos_token_id: int
) -> None:
    """Write full fp32 `state` as a folder that transformers opens."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for ours, values in state.items():
        transposed = family.STORES_TRANSPOSED and ours.startswith("blocks.")
        for name, part in family.to_hf(ours, values, size).items():
            rows = part.reshape(-1, *values.shape[1:])
            tensors[name] = (rows.t() if transposed else rows).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    document = {**family.to_config(size, eos_token_id), "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(document, indent=2) + "\n")
