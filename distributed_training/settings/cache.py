"""Locate and protect this user's cache folders. This module imports only modules that load quickly.

Python, torch's compiler, Triton and PyTorch's extension loader run code that they find in these
folders. Other users must therefore not be able to change the folders."""

import contextlib
import os
import stat
import sys
from pathlib import Path

# Environment variable that names this suite's cache folder. If its value is /dev/null, a temporary
# folder is used.
CACHE_VARIABLE = "DISTRIBUTED_TRAINING_CACHE"
PRIVATE_MODE = 0o700


def cache_folder() -> Path:
    """Return this user's cache folder: the value of DISTRIBUTED_TRAINING_CACHE or, if it is not
    set, ~/.cache/distributed-training. If this user cannot write to ~/.cache/distributed-training,
    return a folder in $TMPDIR or /tmp."""
    named_folder = os.environ.get(CACHE_VARIABLE)
    if named_folder:
        return Path(named_folder)
    folder = Path(os.path.expanduser("~"), ".cache", "distributed-training")
    existing = next(path for path in (folder, *folder.parents) if path.is_dir())
    return folder if folder.is_absolute() and os.access(existing, os.W_OK) else _temporary_folder()


def use_private_caches() -> None:
    """Make torch's compiler, Triton and PyTorch extensions use private folders in this process and
    its child processes. By default, torch's compiler uses a folder in /tmp, even if another user
    created that folder. Raises UserError if a folder cannot be created, if it belongs to neither
    this user nor root, or if every user may write to it."""
    from importlib.metadata import version

    from distributed_training.settings.errors import UserError, print_stderr
    from distributed_training.settings.launchers import prints_messages

    # Without a home folder, libraries would create a folder named ~ in the current folder.
    if not os.path.isabs(os.path.expanduser("~")):
        home, why = create_private_folder("home", _temporary_folder())
        if why:
            raise UserError(f"{home} cannot be this user's home folder", why, "set HOME")
        os.environ["HOME"] = str(home)
    root, _ = create_private_folder("")
    if root.is_relative_to(_temporary_folder()) and not os.environ.get(CACHE_VARIABLE):
        os.environ[CACHE_VARIABLE] = str(root)  # so that child processes do not repeat the note
        if prints_messages(os.environ):
            note = f"note: caches are in {root}, because this user has no writable home folder"
            print_stderr(f"{note}. To use another folder, set {CACHE_VARIABLE}.")
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    for variable, name in {
        "TORCHINDUCTOR_CACHE_DIR": "inductor",  # also contains Triton's folder
        "TRITON_CACHE_DIR": None,
        "TORCH_EXTENSIONS_DIR": f"extensions/{python}-torch-{version('torch')}",
        "PYTHONPYCACHEPREFIX": None,
    }.items():
        if value := os.environ.get(variable):
            folder = Path(value).resolve()  # a link could be redirected before it is used
            why = _unsafe_reason(folder) or _creation_obstacle(folder)
        elif name:
            folder, why = create_private_folder(name)
        else:
            continue
        if why:
            fix = f"set {variable if value else CACHE_VARIABLE} to a folder of your own"
            raise UserError(f"{folder} is not a safe place for code that this user runs", why, fix)
        os.environ[variable] = str(folder)


def create_private_folder(name: str, *roots: Path) -> tuple[Path, str]:
    """Create the folder `name`, with mode 0700, in the first of `roots` in which it can be created.
    The default roots are this user's cache folder and, unless DISTRIBUTED_TRAINING_CACHE names a
    cache folder, the temporary folder. Return (folder, reason why it must not be used). The reason
    is "" if the folder may be used."""
    why = ""
    fallbacks = () if _named_folder() else (_temporary_folder(),)
    for root in roots or (cache_folder().resolve(), *fallbacks):
        folder = root
        try:
            root.mkdir(PRIVATE_MODE, parents=True, exist_ok=True)
            why = _unsafe_reason(root)
            for part in Path(name).parts if not why else ():
                folder /= part
                folder.mkdir(PRIVATE_MODE, exist_ok=True)
                why = why or _unsafe_reason(folder) or _unsafe_reason(folder.resolve())
                # A link may point to a folder that other users need, so the folder's mode is kept.
                if not folder.is_symlink() and folder.stat().st_uid == os.geteuid():
                    folder.chmod(PRIVATE_MODE)
            return folder, why
        except OSError as error:
            why = f"it cannot be created: {error.strerror}"
    return folder, why


def _named_folder() -> str:
    folder = os.environ.get(CACHE_VARIABLE, "")
    return "" if folder == os.devnull else folder


def _unsafe_reason(folder: Path) -> str:
    """Return the reason why `folder` is unsafe: it belongs to neither this user nor root, or every
    user may write to it. Return "" if the folder is safe or does not exist."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        status = folder.lstat()
        if status.st_uid not in (0, os.geteuid()):
            return f"it belongs to user {status.st_uid}"
        if stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_IWOTH:
            return "every user may write to it"
    return ""


def _creation_obstacle(folder: Path) -> str:
    """Return the reason why `folder` cannot be created. Return "" if it exists or can be created. A
    folder that this check creates is removed, because it may never be needed."""
    if os.path.lexists(folder) and not folder.is_dir():
        return "it is not a folder"
    missing = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        for path in missing[-1:]:
            path.mkdir(PRIVATE_MODE, exist_ok=True)
            with contextlib.suppress(OSError):  # another process already uses the folder
                path.rmdir()
    except OSError as error:
        return f"it cannot be created: {error.strerror}"
    return ""


def _temporary_folder() -> Path:
    return Path(os.environ.get("TMPDIR") or "/tmp", f"distributed-training-{os.geteuid()}")
