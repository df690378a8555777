"""Run code from outside the package: the user's own model families and engines. This module does
not import torch.

Only `load_code` runs such code. The user must have named the code by a path in CONFIG or on the
command line. Engines in this checkout's strategies/ are also allowed. Data files (an adapter, a
run's plan or record, a preset, a list of runs) never cause code to run."""

import functools
import os
import sys
import zlib
from collections.abc import Iterable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from distributed_training.settings.errors import UserError

_allowed_folders: set[Path] = set()  # folders whose code may run


def allow_code(folder: Path) -> None:
    """Allow the code in `folder` to run. Call this function only for a folder that the user has
    named or that is part of this checkout."""
    _allowed_folders.add(folder.resolve())


def allowed_code_folders() -> list[str]:
    """Return the folders whose code may run, so that they can be passed to child processes."""
    return sorted(map(str, _allowed_folders))


def allow_families(models: Iterable[object]) -> None:
    """For each element of `models` that is the path to a model family's folder, allow the code in
    this folder to run. The elements must come from CONFIG or the command line."""
    for model in models:
        if folder := _family_folder(model):
            allow_code(folder)


def require_allowed_code(folder: Path, what: str) -> None:
    """Raise UserError unless the code in `folder` is allowed to run. `what` describes the code in
    the message."""
    if folder.resolve() not in _allowed_folders:
        why = "this code is named only in a file, and code runs only if you name it yourself"
        fix = f"read the code, and if you trust it, add --model {folder}"
        raise UserError(f"{what} is code and was not run", why, fix)


def require_allowed_family(model: str) -> None:
    """Raise UserError if `model`, from the merged CONFIG, is the path to code that was named only
    by a preset or a list of runs. Without this check, child processes would run the code,
    because they receive the model on their command line."""
    folder = _family_folder(model)
    if folder and (folder / "__init__.py").is_file() and not (folder / "config.json").is_file():
        require_allowed_code(folder, f"the model family {folder}")


def _family_folder(model: object) -> Path | None:
    # A bare word, such as auto, does not name a folder, even if a folder of that name exists.
    if isinstance(model, str) and os.sep in model:
        return Path(os.path.expanduser(model.partition(":")[0])).resolve()
    return None


def load_code(file: Path, what: str) -> ModuleType:
    """Import a Python file of the user. Raises UserError if the code in the file's folder is not
    allowed to run. `what` describes the code in the message."""
    require_allowed_code(file.parent, what)
    return import_file(file)


@functools.cache
def import_file(file: Path) -> ModuleType:
    """Import a Python file from outside the package under a unique module name. Later calls return
    the same module."""
    name = f"{file.parent.name}_{file.stem}_{zlib.crc32(str(file.parent).encode()):08x}"
    spec: Any = spec_from_file_location(name, file)
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
