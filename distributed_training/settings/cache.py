"""Folders that a user keeps on a machine for later runs. No imports that take time.

Python, torch's compiler, Triton and torch's extensions run code that they find in these folders, so
each belongs to this user alone."""

import contextlib
import importlib.util
import os
import stat
import subprocess
import sys
from pathlib import Path

LARGE = ("torch", "sympy", "networkx")  # what torch's compiler imports
MANY_CORES = 8  # with fewer, compiling all takes longer than compiling what is imported
CACHE = "DISTRIBUTED_TRAINING_CACHE"  # variable with this suite's own folder
PRIVATE = 0o700


def cache_folder() -> Path:
    """Return this user's folder: DISTRIBUTED_TRAINING_CACHE, or one below the home folder or, for a
    user without a home that can be written, in the folder for temporary files."""
    given = os.environ.get(CACHE)
    if given:
        return Path(given)
    folder = Path(os.path.expanduser("~"), ".cache", "distributed-training")
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    return folder if folder.is_absolute() and os.access(there, os.W_OK) else _temporary_folder()


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


def use_private_caches() -> None:
    """Point torch's compiler, Triton and torch's extensions to folders of this user's own, here and
    in processes started from here: by default torch's compiler uses one in /tmp, whoever made it.
    Raises UserError for a folder that somebody else owns or may write to."""
    from importlib.metadata import version

    from distributed_training.settings.errors import UserError

    if not os.path.isabs(os.path.expanduser("~")):  # else libraries make a folder called ~ here
        home, why = private_folder("home", _temporary_folder())
        if why:
            raise UserError(f"{home} cannot be this user's home folder", why, "set HOME")
        os.environ["HOME"] = str(home)
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    for variable, name in {
        "TORCHINDUCTOR_CACHE_DIR": "inductor",  # Triton's is below it
        "TRITON_CACHE_DIR": None,
        "TORCH_EXTENSIONS_DIR": f"extensions/{python}-torch-{version('torch')}",
        "PYTHONPYCACHEPREFIX": None,
    }.items():
        if given := os.environ.get(variable):
            folder = Path(given).resolve()  # a link could lead elsewhere by the time it is used
            why = _unsafe(folder)
        elif name:
            folder, why = private_folder(name)
        else:
            continue
        if why:
            fix = f"set {variable if given else CACHE} to a folder of your own"
            raise UserError(f"{folder} cannot hold code that this user runs", why, fix)
        os.environ[variable] = str(folder)


def private_folder(name: str, *roots: Path) -> tuple[Path, str]:
    """Make a folder of mode 0700 below the first of `roots` that allows it, by default this user's.
    Return it, and why it cannot be used, if so."""
    why = ""
    for root in roots or (cache_folder().resolve(), _temporary_folder()):
        folder = root
        try:
            root.mkdir(PRIVATE, parents=True, exist_ok=True)
            why = _unsafe(root)
            for part in Path(name).parts if not why else ():
                folder /= part
                folder.mkdir(PRIVATE, exist_ok=True)
                why = why or _unsafe(folder)
                if folder.stat().st_uid == os.geteuid():
                    folder.chmod(PRIVATE)
            return folder, why
        except OSError as error:
            why = f"it cannot be made: {error.strerror}"
    return folder, why


def _unsafe(folder: Path) -> str:
    """Return why others could put files into a folder, "" if only this user and root can."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        found = folder.lstat()
        if found.st_uid not in (0, os.geteuid()):
            return f"it belongs to user {found.st_uid}"
        if stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_IWOTH:
            return "every user may write to it"
    return ""


def _temporary_folder() -> Path:
    return Path(os.environ.get("TMPDIR") or "/tmp", f"distributed-training-{os.geteuid()}")
