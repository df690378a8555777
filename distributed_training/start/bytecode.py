"""Keep the bytecode that Python compiles. No imports that take time."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from distributed_training.settings.cache import private_folder

LARGE = ("torch", "sympy", "networkx")  # what torch's compiler imports
MANY_CORES = 8  # with fewer, compiling all takes longer than compiling what is imported


def keep_bytecode() -> None:
    """Where Python would compile sources at every start, let it keep what it compiles, here and in
    processes started from here: beside them, or in our cache where torch's are not compiled either.
    Images often set PYTHONDONTWRITEBYTECODE, or are read-only: then compiling takes each process
    longer than importing does. Of the first one most is done beside it, by other cores."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None or sys.pycache_prefix is not None:
        return
    compiled = Path(importlib.util.cache_from_source(torch.origin))
    written = not sys.dont_write_bytecode and os.access(Path(torch.origin).parent, os.W_OK)
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if compiled.is_file() or written:
        return
    folder, why = private_folder("bytecode")
    if why:  # `use_private_caches` says so
        return
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(folder)
    if Path(importlib.util.cache_from_source(torch.origin)).is_file():
        return
    first = os.environ.get("LOCAL_RANK", "0") == "0"  # of those that a launcher starts here
    if first and (os.cpu_count() or 1) >= MANY_CORES:
        specs = map(importlib.util.find_spec, LARGE)
        folders = [str(Path(spec.origin).parent) for spec in specs if spec and spec.origin]
        # Isolated: with -m Python looks for modules in the current folder first.
        python = [sys.executable, "-I", "-X", f"pycache_prefix={folder}"]
        command = [*python, "-m", "compileall", "-q", "-j16", "-x/tests?/", *folders]
        quiet = subprocess.DEVNULL
        subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)
