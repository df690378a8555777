"""Find the files of each split of a dataset, following the conventions of the datasets library."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from distributed_training.data.files import COMPRESSIONS, RECORD_SUFFIXES, TEXT_SUFFIXES, suffix_of
from distributed_training.settings.errors import UserError, describe
from distributed_training.settings.files import one_of

SUFFIXES = (*TEXT_SUFFIXES, *RECORD_SUFFIXES)
CARD = "README.md"
# Files that describe a dataset or a model and contain no samples
METADATA_FILES = {
    CARD,
    "config.json",
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
}
# Names that may assign a file to a split. If no file has such a name, all files are training files,
# and the datasets library is not needed. Importing this library takes a second or more.
_MAY_BE_SPLIT = re.compile(r"train|val|dev|test|eval|-of-|instruction\.md")
Splits = dict[str, list[Path]]


def check_dataset_exists(path: Path, what: str) -> None:
    """Raise UserError if `path` is neither a regular file nor a folder. `what` names the dataset in
    the error message."""
    if path.is_file() or path.is_dir():
        return
    why = "is not a regular file" if path.exists() else "does not exist"
    fix = f"use a {one_of(SUFFIXES)} file (optionally compressed: {', '.join(COMPRESSIONS)}), a "
    fix += 'folder of such files, "wikitext-2" or "embedded"'
    raise UserError(f"{what} {why}", fix=fix)


def find_splits(path: Path, what: str) -> Splits:
    """Return the files of each split of a dataset on disk. `path` may be a file, a folder of files,
    a clone of a dataset from the Hub, or the output of `save_to_disk`. `what` names the dataset in
    error messages. Raises UserError if `path` is anything else or cannot be read."""
    if path.is_file():
        if suffix_of(path) in SUFFIXES:
            return {"train": [path]}
        raise _unusable_error(what, [path])
    check_dataset_exists(path, what)
    if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return _read_saved_splits(path, what)
    files = sorted(file for file in path.rglob("*") if _has_samples(file, path))
    if not files:
        raise _unusable_error(what, [file for file in path.iterdir() if file.is_file()])
    names = [file.relative_to(path).as_posix() for file in files]
    card = path / CARD
    has_configs = card.is_file() and "configs:" in card.read_text(errors="replace")
    if not has_configs and not any(map(_MAY_BE_SPLIT.search, names)):
        return {"train": files}
    return _find_splits_by_convention(path, what)


def _has_samples(file: Path, folder: Path) -> bool:
    """Return whether a file contains samples: its suffix is known, it is not hidden, and it is not
    in METADATA_FILES."""
    relative = file.relative_to(folder)
    hidden = any(part.startswith((".", "__")) for part in relative.parts[:-1])
    hidden = hidden or relative.name.startswith(".") or relative.name in METADATA_FILES
    return suffix_of(file) in SUFFIXES and not hidden and not file.is_dir()


def _find_splits_by_convention(folder: Path, what: str) -> Splits:
    """Return the files of each split as `datasets.load_dataset(folder)` would find them. Raises
    UserError if the search fails, or if a file is outside the folder."""
    import datasets

    try:
        files_by_split = datasets.load_dataset_builder(str(folder)).config.data_files
    except Exception as error:  # errors from datasets, YAML or the file system
        raise UserError(f"{what} cannot be divided into splits", describe(error)) from None
    splits = {}
    for split, names in files_by_split.items():
        paths = sorted(Path(os.path.normpath(name)) for name in names)
        for path in paths:
            if not path.is_relative_to(folder.resolve()):
                raise UserError(f"{what} refers to {path}, which is outside the folder")
        if readable := [path for path in paths if _has_samples(path, folder.resolve())]:
            splits[str(split)] = readable
    return splits


def _read_saved_splits(folder: Path, what: str) -> Splits:
    """Return the Arrow files of each split of a dataset that `save_to_disk` wrote. Raises UserError
    if the dataset cannot be read."""
    import datasets

    try:
        dataset = datasets.load_from_disk(str(folder))
    except Exception as error:  # errors from datasets and pyarrow
        raise UserError(f"{what} cannot be read", describe(error)) from None
    dataset_by_split = dataset if isinstance(dataset, dict) else {"train": dataset}
    return {
        str(name): [Path(file["filename"]) for file in split.cache_files]
        for name, split in dataset_by_split.items()
    }


def _unusable_error(what: str, files: Sequence[Path]) -> UserError:
    found = ", ".join(sorted({suffix_of(file) or "without a suffix" for file in files}))
    why = f"it has only files {found}" if found else "the folder has no files"
    return UserError(f"{what} cannot be read", why, f"use {one_of(SUFFIXES)} files")
