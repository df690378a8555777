"""What a machine keeps for later runs. No imports that take time."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """Of this suite and user."""
    given = os.environ.get("DISTRIBUTED_TRAINING_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "distributed-training"


def keep_bytecode() -> None:
    """Where Python would compile torch's sources at every start, let it keep what it compiles in
    our cache, here and in processes started from here. Images often set PYTHONDONTWRITEBYTECODE, or
    are read-only: then compiling takes each process longer than importing does.
    """
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None or sys.pycache_prefix is not None:
        return
    compiled = Path(importlib.util.cache_from_source(torch.origin))
    written = not sys.dont_write_bytecode and os.access(Path(torch.origin).parent, os.W_OK)
    if compiled.is_file() or written:
        return
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(cache_folder() / "bytecode")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
