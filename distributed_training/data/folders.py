"""Find the files of each split of a dataset, following the conventions of the datasets library."""

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed_training.data.chats.records import Record
from distributed_training.data.files import RECORD_SUFFIXES, TEXT_SUFFIXES, read_records
from distributed_training.settings.errors import UserError, describe
from distributed_training.settings.files import is_outside, load_object, one_of, shown

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
    fix = f'use a {one_of(SUFFIXES)} file, a folder of such files, "wikitext-2" or "embedded"'
    raise UserError(f"{what} {why}", fix=fix)


def find_splits(path: Path, what: str, columns: Mapping[str, str]) -> Splits:
    """Return the files of each split of a dataset on disk. `path` may be a file, a folder of files,
    a clone of a dataset from the Hub, or the output of `save_to_disk`. `what` names the dataset in
    error messages, and `columns` renames columns (`Record`). If a folder has records, its text
    files only describe them. Raises UserError if `path` is anything else or cannot be read."""
    if path.is_file():
        if path.suffix in SUFFIXES:
            return {"train": [path]}
        raise _unusable_error(what, [path])
    check_dataset_exists(path, what)
    files = sorted(file for file in path.rglob("*") if _has_samples(file, path))
    saved = _list_saved(path)
    if missing := {*saved}.difference(files):
        what = f"{what} cannot be read"
        raise UserError(what, f"{min(missing)} is missing", "save the dataset again")
    files = saved or files
    texts = [file for file in files if file.suffix in TEXT_SUFFIXES]
    records = [file for file in files if file.suffix in RECORD_SUFFIXES]
    with_records = [file for file in records if not _is_metadata(file, columns)]
    files = with_records or texts or records
    if not files:
        raise _unusable_error(what, [file for file in path.iterdir() if file.is_file()])
    if saved and saved[0].parent == path:
        return {"train": files}  # Folders beside these files are splits of an earlier dataset.
    names = [file.relative_to(path).as_posix() for file in files]
    card = path / CARD
    has_configs = card.is_file() and "configs:" in card.read_text(errors="replace")
    if not has_configs and not any(map(_MAY_BE_SPLIT.search, names)):
        return {"train": files}
    return _find_splits_by_convention(path, files, what)


def _has_samples(file: Path, folder: Path) -> bool:
    """Return whether a file contains samples: its suffix is known, and it is not hidden, not in
    METADATA_FILES, not a cache of the datasets library and not a link to a file outside the
    folder."""
    is_sample = file.suffix in SUFFIXES and file.name not in METADATA_FILES
    is_sample = is_sample and not file.match("cache-*.arrow")
    is_sample = is_sample and not file.is_dir() and not is_hidden(file.relative_to(folder))
    # A pipe, device or broken link is refused when it is opened.
    return is_sample and not (file.is_file() and is_outside(file, folder))


def _list_saved(folder: Path) -> list[Path]:
    """Return the files of the dataset that `save_to_disk` wrote to a folder, or [] for another
    folder. As in `load_from_disk`, other files may be from an earlier call."""
    state, splits = folder / "state.json", folder / "dataset_dict.json"
    if state.is_file():
        files = load_object(state, "dataset file").get("_data_files", [])
        return sorted(folder / file["filename"] for file in files)
    if not splits.is_file():
        return []
    names = load_object(splits, "dataset file")["splits"]
    return [file for name in names for file in _list_saved(folder / name)]


def is_hidden(path: Path) -> bool:
    """Return whether a part of a relative path begins with a period or two underscores."""
    return any(part.startswith((".", "__")) for part in path.parts)


def _is_metadata(file: Path, columns: Mapping[str, str]) -> bool:
    """Return whether a file is a .json file with a single value that is not a record, or with a
    list of values that are not objects."""
    if file.suffix != ".json":
        return False
    values = list(itertools.islice(read_records(file, columns=()), 2))
    if not values:
        return True
    where, value = values[0]
    try:
        Record(value, where, columns)
    except UserError:
        return len(values) == 1 or not isinstance(value, dict)
    return False


def read_card(card: Path, what: str) -> Any:
    """Return the configurations in a dataset's card as MetadataConfigs. Raises UserError if a
    configuration refers to files elsewhere, because the datasets library would connect to any
    server and search any folder that a card names."""
    from datasets.data_files import sanitize_patterns
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCard
    from yaml import AliasToken, scan

    text = card.read_text(encoding="utf-8-sig", errors="replace")
    if not text.startswith("---"):
        return {}
    front_matter = text.partition("\n---")[0]
    if any(isinstance(token, AliasToken) for token in scan(front_matter)):
        why = "a few aliases can stand for any amount of text"
        raise UserError(f"{what}: {card.name} has YAML aliases", why, "write out their values")
    configs = MetadataConfigs.from_dataset_card_data(DatasetCard(text).data)
    for config in configs.values():
        data_files = sanitize_patterns(config.get("data_files") or "")
        for pattern in (config.get("data_dir") or "", *itertools.chain(*data_files.values())):
            # A colon occurs in ftp://host/file and in zip://file::archive.
            if ":" in pattern or os.path.isabs(pattern) or ".." in Path(pattern).parts:
                why = "a dataset may refer only to its own files"
                raise UserError(f"{what}: {card.name} refers to {shown(pattern)}", why)
    return configs


def _find_splits_by_convention(folder: Path, files: Sequence[Path], what: str) -> Splits:
    """Return which of the `files` in a folder belong to each split, according to the datasets
    library. Raises UserError if the search fails."""
    from datasets.data_files import DataFilesDict, get_data_patterns, sanitize_patterns

    base = folder.resolve()
    known_files = {base / file.relative_to(folder) for file in files}
    patterns = None
    try:
        configs: Any = {}
        if (folder / CARD).is_file():
            configs = read_card(folder / CARD, what)
        if configs:
            name = configs.get_default_config_name()
            if name is None:
                why = f"its configurations are {shown(list(configs))}"
                fix = f"mark one of them in {CARD} with default: true, or set dataset to its files"
                raise UserError(f"{what} has no default configuration", why, fix)
            base /= configs[name].get("data_dir") or ""
            patterns = configs[name].get("data_files")
        patterns = sanitize_patterns(patterns) if patterns else get_data_patterns(str(base))
        files_by_split = DataFilesDict.from_patterns(patterns, base_path=str(base))
    except UserError:
        raise
    except Exception as error:  # errors from datasets, YAML or the file system
        raise UserError(f"{what} cannot be divided into splits", describe(error)) from None
    splits = {}
    for split, names in files_by_split.items():
        used_files = known_files.intersection(Path(os.path.normpath(name)) for name in names)
        if used_files:
            splits[str(split)] = sorted(used_files)
    return splits


def _unusable_error(what: str, files: Sequence[Path]) -> UserError:
    found = ", ".join(sorted({file.suffix or "without a suffix" for file in files}))
    why = f"it has only files {found}, or links to other folders" if found else "it has no files"
    return UserError(f"{what} cannot be read", why, f"use {one_of(SUFFIXES)} files")
