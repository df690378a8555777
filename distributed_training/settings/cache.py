"""Folders that a user keeps on a machine for later runs. No imports that take time.

Python, torch's compiler, Triton and torch's extensions run code that they find in these folders, so
each belongs to this user alone."""

import contextlib
import os
import stat
import sys
from pathlib import Path

# Variable with this suite's own folder; /dev/null: only a folder for temporary files
CACHE = "DISTRIBUTED_TRAINING_CACHE"
PRIVATE = 0o700


def cache_folder() -> Path:
    """Return this user's folder: DISTRIBUTED_TRAINING_CACHE, or a folder below the home folder. If
    the home folder cannot be written, it is in the folder for temporary files."""
    given = os.environ.get(CACHE)
    if given:
        return Path(given)
    folder = Path(os.path.expanduser("~"), ".cache", "distributed-training")
    existing = next(path for path in (folder, *folder.parents) if path.is_dir())
    return folder if folder.is_absolute() and os.access(existing, os.W_OK) else _temporary_folder()


def use_private_caches() -> None:
    """Point torch's compiler, Triton and torch's extensions to folders of this user's own, for this
    process and the processes it starts. By default torch's compiler uses a folder in /tmp, even if
    another user made it. Raises UserError for a folder that another user owns or may write to."""
    from importlib.metadata import version

    from distributed_training.settings.errors import UserError
    from distributed_training.settings.launchers import is_first

    if not os.path.isabs(os.path.expanduser("~")):  # else libraries make a folder called ~ here
        home, why = private_folder("home", _temporary_folder())
        if why:
            raise UserError(f"{home} cannot be this user's home folder", why, "set HOME")
        os.environ["HOME"] = str(home)
    root, _ = private_folder("")
    if root.is_relative_to(_temporary_folder()) and not os.environ.get(CACHE):
        os.environ[CACHE] = str(root)  # processes started from here say nothing
        if is_first(os.environ):
            note = f"note: this user has no home folder that can be written: caches are in {root}"
            print(f"{note}; {CACHE} names another folder", file=sys.stderr)
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
    Return the folder and the reason why it cannot be used, or "". A folder that CACHE names has no
    substitute."""
    why = ""
    others = () if _named_folder() else (_temporary_folder(),)
    for root in roots or (cache_folder().resolve(), *others):
        folder = root
        try:
            root.mkdir(PRIVATE, parents=True, exist_ok=True)
            why = _unsafe(root)
            for part in Path(name).parts if not why else ():
                folder /= part
                folder.mkdir(PRIVATE, exist_ok=True)
                why = why or _unsafe(folder) or _unsafe(folder.resolve())
                # A link may point to a folder that other users need, so its mode is not changed.
                if not folder.is_symlink() and folder.stat().st_uid == os.geteuid():
                    folder.chmod(PRIVATE)
            return folder, why
        except OSError as error:
            why = f"it cannot be made: {error.strerror}"
    return folder, why


def _named_folder() -> str:
    given = os.environ.get(CACHE, "")
    return "" if given == os.devnull else given


def _unsafe(folder: Path) -> str:
    """Return why others could put files into a folder, "" if only this user and root can."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        status = folder.lstat()
        if status.st_uid not in (0, os.geteuid()):
            return f"it belongs to user {status.st_uid}"
        if stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_IWOTH:
            return "every user may write to it"
    return ""


def _temporary_folder() -> Path:
    return Path(os.environ.get("TMPDIR") or "/tmp", f"distributed-training-{os.geteuid()}")
