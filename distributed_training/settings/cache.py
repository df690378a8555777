"""Locate and protect this user's cache folders. This module imports only modules that load quickly.

Python, torch's compiler, Triton and PyTorch's extension loader run code that they find in these
folders, so a folder of another user is never used."""

import os
import sys
from pathlib import Path

from distributed_training.settings.errors import UserError

CACHE_VARIABLE = "DISTRIBUTED_TRAINING_CACHE"  # names this suite's cache folder


def cache_folder() -> Path:
    """Return this user's cache folder: the value of DISTRIBUTED_TRAINING_CACHE or, if it is not
    set, ~/.cache/distributed-training."""
    default = Path(os.path.expanduser("~"), ".cache", "distributed-training")
    return Path(os.environ.get(CACHE_VARIABLE) or default)


def use_private_caches() -> None:
    """Make torch's compiler and PyTorch's extensions use private folders in this process and its
    child processes. By default, torch's compiler uses a folder in /tmp, even if another user
    created that folder. Raises UserError if a folder belongs to another user or cannot be
    created."""
    from importlib.metadata import version

    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    for variable, name in {
        "TORCHINDUCTOR_CACHE_DIR": "inductor",  # also contains Triton's folder
        "TORCH_EXTENSIONS_DIR": f"extensions/{python}-torch-{version('torch')}",
        "TRITON_CACHE_DIR": "",
        "PYTHONPYCACHEPREFIX": "",
    }.items():
        if value := os.environ.get(variable):
            _create(Path(value), variable)
        elif name:
            os.environ[variable] = str(private_folder(name))


def private_folder(name: str) -> Path:
    """Create the folder `name` in this user's cache folder, with mode 0700, and return it. Raises
    UserError if it belongs to another user or cannot be created."""
    root = cache_folder().absolute()
    _create(root, CACHE_VARIABLE)
    _create(root / name, CACHE_VARIABLE)
    return root / name


def _create(folder: Path, variable: str) -> None:
    fix = f"set {variable} to a folder of your own"
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        owner = folder.stat().st_uid
    except OSError as error:
        raise UserError(f"{folder} cannot be created", error.strerror or "", fix) from None
    if owner not in (0, os.geteuid()):
        raise UserError(f"{folder} belongs to user {owner}", "it may contain their code", fix)
