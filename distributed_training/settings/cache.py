"""Locate and protect the folders in which a user keeps files for later runs. Imports nothing slow.

Python, torch's compiler, Triton and torch's extensions run code that they find in these folders, so
each folder must belong to this user alone."""

import contextlib
import os
import stat
import sys
from pathlib import Path

# Environment variable with the folder for this suite's files. With /dev/null, only the folder for
# temporary files is used.
CACHE = "DISTRIBUTED_TRAINING_CACHE"
PRIVATE = 0o700


def cache_folder() -> Path:
    """Return this user's folder for caches: DISTRIBUTED_TRAINING_CACHE, or a folder in the home
    folder. If the home folder is not writable, it is in the folder for temporary files."""
    named_folder = os.environ.get(CACHE)
    if named_folder:
        return Path(named_folder)
    folder = Path(os.path.expanduser("~"), ".cache", "distributed-training")
    existing = next(path for path in (folder, *folder.parents) if path.is_dir())
    return folder if folder.is_absolute() and os.access(existing, os.W_OK) else _temporary_folder()


def use_private_caches() -> None:
    """Make torch's compiler, Triton and torch's extensions use folders of this user, in this
    process and the processes that it starts. By default torch's compiler uses a folder in /tmp,
    even if another user made it. Raises UserError for a folder that another user owns or may write
    to."""
    from importlib.metadata import version

    from distributed_training.settings.errors import UserError
    from distributed_training.settings.launchers import is_first

    # Otherwise libraries would make a folder called ~ here
    if not os.path.isabs(os.path.expanduser("~")):
        home, why = private_folder("home", _temporary_folder())
        if why:
            raise UserError(f"{home} cannot be this user's home folder", why, "set HOME")
        os.environ["HOME"] = str(home)
    root, _ = private_folder("")
    if root.is_relative_to(_temporary_folder()) and not os.environ.get(CACHE):
        os.environ[CACHE] = str(root)  # so that child processes do not repeat the note
        if is_first(os.environ):
            note = f"note: caches are in {root}, because this user has no writable home folder"
            print(f"{note}. To use another folder, set {CACHE}.", file=sys.stderr)
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    for variable, name in {
        "TORCHINDUCTOR_CACHE_DIR": "inductor",  # Triton's folder is inside it
        "TRITON_CACHE_DIR": None,
        "TORCH_EXTENSIONS_DIR": f"extensions/{python}-torch-{version('torch')}",
        "PYTHONPYCACHEPREFIX": None,
    }.items():
        if value := os.environ.get(variable):
            folder = Path(value).resolve()  # a link could be redirected before it is used
            why = _unsafe(folder) or _obstacle_to_creating(folder)
        elif name:
            folder, why = private_folder(name)
        else:
            continue
        if why:
            fix = f"set {variable if value else CACHE} to a folder of your own"
            raise UserError(f"{folder} is not a safe place for code that this user runs", why, fix)
        os.environ[variable] = str(folder)


def private_folder(name: str, *roots: Path) -> tuple[Path, str]:
    """Make the folder `name`, with mode 0700, in the first of `roots` that allows it. By default
    the root is this user's cache folder or, unless CACHE names the cache folder, a temporary
    folder. Return the folder and the reason why it cannot be used, or ""."""
    why = ""
    fallbacks = () if _named_folder() else (_temporary_folder(),)
    for root in roots or (cache_folder().resolve(), *fallbacks):
        folder = root
        try:
            root.mkdir(PRIVATE, parents=True, exist_ok=True)
            why = _unsafe(root)
            for part in Path(name).parts if not why else ():
                folder /= part
                folder.mkdir(PRIVATE, exist_ok=True)
                why = why or _unsafe(folder) or _unsafe(folder.resolve())
                # A link may point to a folder that other users need, so its mode stays.
                if not folder.is_symlink() and folder.stat().st_uid == os.geteuid():
                    folder.chmod(PRIVATE)
            return folder, why
        except OSError as error:
            why = f"it cannot be created: {error.strerror}"
    return folder, why


def _named_folder() -> str:
    folder = os.environ.get(CACHE, "")
    return "" if folder == os.devnull else folder


def _unsafe(folder: Path) -> str:
    """Return why other users could put files into a folder, or "" if only this user and root
    can."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        status = folder.lstat()
        if status.st_uid not in (0, os.geteuid()):
            return f"it belongs to user {status.st_uid}"
        if stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_IWOTH:
            return "every user may write to it"
    return ""


def _obstacle_to_creating(folder: Path) -> str:
    """Return why a missing folder cannot be created, or "". Nothing is left behind, because the
    folder may never be needed."""
    missing = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        for path in missing[-1:]:
            path.mkdir(PRIVATE, exist_ok=True)
            with contextlib.suppress(OSError):  # another process has just used it
                path.rmdir()
    except OSError as error:
        return f"it cannot be created: {error.strerror}"
    return ""


def _temporary_folder() -> Path:
    return Path(os.environ.get("TMPDIR") or "/tmp", f"distributed-training-{os.geteuid()}")
