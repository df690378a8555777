"""Make Python save the bytecode that it compiles. This module imports only modules that load
quickly."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from distributed_training.settings.cache import private_folder

LARGE_PACKAGES = ("torch", "sympy", "networkx")  # large packages that torch's compiler needs
# With fewer cores, compiling whole packages takes longer than compiling only the imported modules
MIN_CORES = 8


def keep_bytecode() -> None:
    """Make this process and its children save compiled bytecode if Python would otherwise recompile
    modules at every start.

    Container images often set PYTHONDONTWRITEBYTECODE or are read-only, and compiling a module
    takes longer than loading its bytecode. Bytecode stays next to the sources if torch's bytecode
    is already there or if Python can write there. Otherwise, the bytecode is written to this user's
    cache folder. If this folder does not contain torch's bytecode yet and there are enough cores,
    local rank 0 compiles most of torch in background processes."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None or sys.pycache_prefix is not None:
        return
    bytecode_file = Path(importlib.util.cache_from_source(torch.origin))
    is_writable = not sys.dont_write_bytecode and os.access(Path(torch.origin).parent, os.W_OK)
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if bytecode_file.is_file() or is_writable:
        return
    folder = private_folder("bytecode")
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(folder)
    if Path(importlib.util.cache_from_source(torch.origin)).is_file():
        return
    is_local_rank_0 = os.environ.get("LOCAL_RANK", "0") == "0"  # also true without a launcher
    if is_local_rank_0 and (os.cpu_count() or 1) >= MIN_CORES:
        specs = map(importlib.util.find_spec, LARGE_PACKAGES)
        folders = [str(Path(spec.origin).parent) for spec in specs if spec and spec.origin]
        # Use isolated mode, because -m makes Python look for modules in the current folder first.
        python = [sys.executable, "-I", "-X", f"pycache_prefix={folder}"]
        command = [*python, "-m", "compileall", "-q", "-j16", "-x/tests?/", *folders]
        devnull = subprocess.DEVNULL
        subprocess.Popen(command, stdin=devnull, stdout=devnull, stderr=devnull)
