"""Weights in Hugging Face's format: one file of tensors, or several with an index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from distributed_training.models import weight_files
from distributed_training.settings.errors import UserError

Read = Callable[[str, str, Sequence[int]], torch.Tensor]


def stored_weights(folder: Path, prefix: str = "") -> Read:
    """A function of (a name without `prefix`, what it is here, its shape) that reads one tensor.
    That raises UserError where there is no such tensor in `folder`."""
    files: list[Any] = [safe_open(file, "pt") for file in weight_files(folder)]
    names = ((file, name) for file in files for name in file.keys())  # noqa: SIM118, no dict
    stored = {name.removeprefix(prefix): (file, name) for file, name in names}

    def read(name: str, ours: str, shape: Sequence[int]) -> torch.Tensor:
        file, theirs = stored.get(name, (None, name))
        tensor = None if file is None else file.get_tensor(theirs)
        if tensor is None or tensor.shape != torch.Size(shape) or not tensor.is_floating_point():
            found = "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            why = f"{name} ({ours} here) is {found} and should be a float {list(shape)}"
            raise UserError(f"weights {folder}: shapes differ", why)
        return tensor

    return read
