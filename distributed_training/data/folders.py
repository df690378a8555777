"""Which files of a dataset belong to which split, by the conventions of the datasets library."""

import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path

from distributed_training.data.files import COMPRESSED, RECORDS, TEXTS, suffix_of
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import nearest

KINDS = (*TEXTS, *RECORDS)
CARD = "README.md"
# Of the library itself, and of models.
ABOUT = {
    CARD,
    "config.json",
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
}
# Without such a name all files train, and datasets, which takes a second or more, is not imported.
_MAY_BE_SPLIT = re.compile(r"train|val|dev|test|eval|-of-|instruction\.md")
Splits = dict[str, list[Path]]


def find_splits(path: Path, what: str) -> Splits:
    """Files by split of a file, or of a folder: with files named after splits, a dataset cloned
    from the Hub, or one that `save_to_disk` wrote. Raises UserError for any other."""
    if path.is_file():
        if suffix_of(path) in KINDS:
            return {"train": [path]}
        raise _unusable(what, [path])
    if not path.is_dir():
        why = "is not a regular file" if path.exists() else "does not exist"
        beside = [file.name for file in path.parent.glob("*")] if path.parent.is_dir() else []
        if not path.exists() and (near := nearest(path.name, beside, cutoff=0.7)):
            raise UserError(f"{what} {why}", fix=f"did you mean {str(path.with_name(near))!r}?")
        fix = f"give a {', '.join(KINDS)} file, also as {' or '.join(COMPRESSED)}, a folder of "
        raise UserError(f"{what} {why}", fix=f'{fix}them, "wikitext-2" or "embedded"')
    if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return _saved(path, what)
    try:
        files = sorted(file for file in path.rglob("*") if _is_ours(file, path))
    except OSError as error:  # it changes meanwhile, as /proc does
        raise UserError(f"{what} cannot be read", str(error)) from None
    for file in files:
        if not file.is_file():
            fix = "remove it, or give the other files themselves"
            raise UserError(f"{what} holds {file}, which is not a regular file", fix=fix)
    if not files:
        raise _unusable(what, [file for file in path.iterdir() if file.is_file()])
    names = [file.relative_to(path).as_posix() for file in files]
    if not (path / CARD).exists() and not any(map(_MAY_BE_SPLIT.search, names)):
        return {"train": files}
    return _by_convention(path, what)


def _is_ours(file: Path, folder: Path) -> bool:
    """Whether a file is read: of a known kind, and not hidden."""
    below = file.relative_to(folder)
    hidden = any(part.startswith((".", "__")) for part in below.parts[:-1])
    hidden = hidden or below.name.startswith(".") or below.name in ABOUT
    return suffix_of(file) in KINDS and not hidden and not file.is_dir()


def _by_convention(folder: Path, what: str) -> Splits:
    """As `datasets.load_dataset(folder)` divides them."""
    from datasets.data_files import DataFilesDict, get_data_patterns, sanitize_patterns
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCard

    patterns = None
    base = folder.resolve()
    card = folder / CARD
    try:
        if card.is_file():
            data = DatasetCard.load(card).data
            configs = MetadataConfigs.from_dataset_card_data(data)
            if configs:
                name = configs.get_default_config_name() or next(iter(configs))
                chosen = configs[name]
                base = (base / chosen.get("data_dir", "")).resolve()
                if chosen.get("data_files"):
                    patterns = sanitize_patterns(chosen["data_files"])
        patterns = patterns or get_data_patterns(str(base))
        found = DataFilesDict.from_patterns(patterns, base_path=str(base))
    except Exception as error:  # of datasets, its YAML, the file systems below it
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise UserError(f"{what} cannot be divided into splits", why) from None
    splits: Splits = {}
    for split, names in found.items():
        paths = sorted(Path(os.path.normpath(name)) for name in names)
        for path in paths:
            if not path.is_relative_to(folder.resolve()):
                raise UserError(f"{what} names {path}, which is not in the folder")
        if own := [path for path in paths if _is_ours(path, folder.resolve())]:
            splits[str(split)] = own
    return splits


def _saved(folder: Path, what: str) -> Splits:
    """Arrow files of what `save_to_disk` wrote."""
    import datasets

    try:
        saved = datasets.load_from_disk(str(folder))
    except Exception as error:  # of datasets and pyarrow
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise UserError(f"{what} cannot be read", why) from None
    parts = saved if isinstance(saved, dict) else {"train": saved}
    splits = {
        str(split): [Path(file["filename"]).resolve() for file in part.cache_files]
        for split, part in parts.items()
    }
    for path in itertools.chain(*splits.values()):
        if not path.is_relative_to(folder.resolve()):
            raise UserError(f"{what} names {path}, which is not in the folder")
    return splits


def _unusable(what: str, files: Sequence[Path]) -> UserError:
    found = sorted({suffix_of(file) or "a file without an extension" for file in files})
    why = f"found {', '.join(found) or 'no ' + ' or '.join(KINDS) + ' file'}"
    return UserError(f"{what} cannot be read", why, f"give {', '.join(KINDS)} files")
