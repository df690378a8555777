"""Find sources of text: local files and folders, the Hub, and Python's standard library. This
module does not import torch."""

import hashlib
import itertools
import os
import re
import shlex
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed_training.data import hub, pieces
from distributed_training.data.chats.records import ANSWERS, COLUMNS, PAIR_EXAMPLE, read_record
from distributed_training.data.files import (
    TEXT_SUFFIXES,
    open_file,
    read_records,
    read_text,
    sha256_of,
)
from distributed_training.data.folders import (
    CARD,
    METADATA_FILES,
    SUFFIXES,
    check_dataset_exists,
    find_splits,
    is_hidden,
)
from distributed_training.data.pieces import Piece
from distributed_training.settings.config import AUTO, Config
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import ROOT, shown

EMBEDDED = "embedded"
PROSE = "embedded-prose"
WIKITEXT = "wikitext-2"
SHIPPED_CHATS = ("ellmoor", "general-chats", "short-answers")  # folders in CHATS_DIR
CHATS_DIR = ROOT / "configs" / "chats"
BUILT_IN = (
    AUTO,
    EMBEDDED,
    PROSE,
    WIKITEXT,
    *SHIPPED_CHATS,
)  # values of `dataset` that are not paths or Hub names
# A paragraph that begins with a capital letter and ends with a period or colon, without code or
# grammar
_PROSE_PARAGRAPH = re.compile(r"(?!.*(?:::=|>>>|\*\*\*|===))[A-Z].{60,}[.:]")
_FORMATS = (".parquet", ".arrow", ".json", ".csv")  # of equally common ones, the first is read
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(:[\w.-]+|:[\w.-]*:[\w.-]+)?")
# Standard library folders that contain tests, vendored code or generated tables
_SKIPPED_FOLDERS = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3"}
_SKIPPED_FOLDERS |= {"__pycache__", "ensurepip", "encodings", "pydoc_data", "turtledemo"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Text or records of one split, either in memory or in files that are read again for each
    use."""

    files: Sequence[Path] = ()
    texts: Sequence[str] = ()
    # For records, the dataset's name of each column that has another name, and of ANSWERS for pairs
    # of answers; None for running text
    columns: Mapping[str, str] | None = None

    @property
    def num_bytes(self) -> int:
        """Approximate size of the text in bytes. Compressed files are counted at their compressed
        size."""
        file_sizes = [file.stat().st_size for file in self.files]
        return sum(file_sizes) + sum(map(len, self.texts))

    def read_texts(self, *, by_line: bool, can_cut: bool) -> Iterator[Piece]:
        """Yield the running text in pieces, in order. If `by_line` is set, yield one piece per
        line."""
        documents: list[Iterable[str]] = [read_text(file, by_line=by_line) for file in self.files]
        documents += [[text] for text in self.texts]
        for blocks in documents:
            if by_line:
                yield from pieces.cut_lines(blocks)
            else:
                yield from pieces.cut_text(blocks, can_cut=can_cut)

    def read_records(self) -> Iterator[tuple[str, Any]]:
        """Yield (location of the record for error messages, record), in order."""
        assert self.columns is not None
        return read_records(*self.files, columns={*COLUMNS, *self.columns.values()})

    def digest(self) -> str:
        """Return the SHA-256 of the column names and the contents. This method reads all files.
        Raises UserError if a file cannot be read."""
        columns = None if self.columns is None else sorted(self.columns.items())
        digest = hashlib.sha256(str(columns).encode())
        for file in self.files:
            with open_file(file) as stream:
                digest.update(sha256_of(stream))
        for text in self.texts:
            data = text.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.hexdigest()


# Sources by split: "train", with one source per dataset, and "validation" if there is a validation
# dataset or if any of the datasets has such a split
Corpus = dict[str, list[Source]]


def fingerprint(corpus: Corpus) -> str:
    """Return the SHA-256 of all contents and their division into splits and datasets. This function
    reads all files."""
    digests = []
    for split, sources in sorted(corpus.items()):
        digests.append((split, [source.digest() for source in sources]))
    return hashlib.sha256(str(digests).encode()).hexdigest()


def count_corpus_bytes(corpus: Corpus) -> int:
    """Return the approximate size of the text in bytes."""
    return sum(source.num_bytes for source in itertools.chain(*corpus.values()))


def split_weights(dataset: str) -> dict[str, float]:
    """Return the weight of each dataset in a value of the key `dataset`, such as
    "a.jsonl:2 b.jsonl". Names are quoted as in a shell, but a quote within a name and a backslash
    belong to the name. A dataset without a weight has weight 1, as does an existing path that ends
    like a weight. Raises UserError if a quote is not closed."""
    texts = dataset.split()
    if os.path.exists(dataset):
        texts = [dataset]
    elif re.search(r"(^|\s)['\"]", dataset):
        try:
            texts = shlex.split(dataset)
        except ValueError as error:
            raise UserError(f"{dataset=} is not accepted", str(error)) from None
    weights: dict[str, float] = {}
    for text in texts:
        name, _, weight = text.rpartition(":")
        if os.path.exists(text) or not re.fullmatch(r"\d+(\.\d+)?", weight):
            name, weight = text, "1"
        weights[name] = weights.get(name, 0) + float(weight)
    return weights


def find_corpus(config: Config) -> Corpus:
    """Find the sources of the datasets in CONFIG. Running text in files is not read until the
    sources are used. Raises UserError if a dataset is missing, empty or of an unsupported kind, or
    if only some of the datasets consist of records."""
    names = parse_columns(config.columns)
    if config.has_pairs:
        names = {name: name for name in ANSWERS} | names
    corpus: Corpus = {}
    for name in split_weights(config.dataset):
        for split, source in _find_sources(name, "dataset", names).items():
            corpus.setdefault(split, []).append(source)
    if len({source.columns is None for source in corpus["train"]}) > 1:
        what = f"dataset={config.dataset!r} mixes running text and records"
        raise UserError(what, fix='write each text as a record: {"text": "..."}')
    if config.validation_dataset is not None:
        sources = _find_sources(config.validation_dataset, "validation_dataset", names)
        corpus["validation"] = [sources.get("validation", sources["train"])]
    texts = [source for source in itertools.chain(*corpus.values()) if source.columns is None]
    if config.has_pairs and texts:
        what = f"preference={config.preference!r} needs records with two answers"
        raise UserError(what, "the dataset is running text", f"write {PAIR_EXAMPLE}")
    return corpus


def find_unread(dataset: str, corpus: Corpus) -> list[str]:
    """Return the files in the datasets' folders that no split in `corpus` uses, as paths relative
    to their folder. Hidden files and files that describe the dataset are left out."""
    # A link may lead to a used file under another name.
    sources = itertools.chain(*corpus.values())
    used_files = {file.resolve() for source in sources for file in source.files}
    ignored_names = METADATA_FILES
    if all(file.suffix in TEXT_SUFFIXES for file in used_files):
        ignored_names = METADATA_FILES - {CARD}  # The card is a text like the others.
    unread = []
    for folder in split_weights(dataset):
        for file in sorted(Path(folder).rglob("*")):
            name = file.relative_to(folder)
            is_ignored = file.name in ignored_names or is_hidden(name)
            if file.is_file() and not is_ignored and file.resolve() not in used_files:
                unread.append(name.as_posix())
    return sorted(unread)


def parse_columns(text: str | None) -> dict[str, str]:
    """Parse text such as "prompt=question,completion=answer" into {our name: the dataset's name}.
    Raises UserError if the text does not have this form or if a name to the left of "=" is not in
    COLUMNS."""
    names = {}
    for pair in text.split(",") if text else ():
        name, _, dataset_name = map(str.strip, pair.partition("="))
        names[name] = dataset_name
        if name not in COLUMNS or not dataset_name:
            what = f"columns={shown(text)} is not accepted"
            why = f"{pair!r} is not NAME=COLUMN, where COLUMN is in your data and NAME is one of "
            fix = "write --columns prompt=question,completion=answer"
            raise UserError(what, why + ", ".join(COLUMNS), fix)
    return names


def _find_sources(dataset: str, key: str, columns: Mapping[str, str]) -> dict[str, Source]:
    """Find the source of each split of a dataset. `key` is the setting that names the dataset.
    Raises UserError if the dataset is not available, cannot be read or has nothing to train on."""
    what = f"{key}={dataset!r}"
    if dataset in (EMBEDDED, PROSE):
        texts = read_embedded() if dataset == EMBEDDED else read_prose()
        return {"train": Source(texts=texts)}
    if dataset == WIKITEXT:
        try:
            parquet = hub.fetch_wikitext()
        except OSError as error:
            raise hub.fetch_error(f"{what} is", error, hub.WIKITEXT_COMMAND) from None
        corpus = {}
        for split, path in parquet.items():
            lines = "".join(row["text"] for _, row in read_records(path, columns=("text",)))
            # An article begins with a line ` = Title = `.
            articles = re.split(r"(?m)^(?= *= [^=\n].* = *$)", lines)
            texts = [text for text in articles if text.strip()]
            corpus[split] = Source(texts=texts)
        return corpus
    if dataset in SHIPPED_CHATS:
        dataset = str(CHATS_DIR / dataset)
    fix = f"set {key} to the file or folder to train on"
    split = ""
    if is_hub_name(dataset):
        splits = hub.fetch_dataset(key, dataset, download=True)
        name, _, config_and_split = dataset.partition(":")
        config, _, split = config_and_split.partition(":")
        fix = f"name one of them: {name}:{config}:{next(iter(splits))}"
    else:
        splits = find_splits(Path(dataset), what, columns)
    train = split or "train"
    if train not in splits:
        why = f"its splits are: {', '.join(splits)}"
        raise UserError(f"{what} has no split called {train}", why, fix)
    used = {"train": splits[train]}
    if not split and "validation" in splits:
        used["validation"] = splits["validation"]
    return {name: _build_source(files, what, columns) for name, files in used.items()}


def check_dataset_path(dataset: str, key: str) -> None:
    """Raise UserError for a path in `dataset` (see `split_weights`) that leads to neither a regular
    file nor a folder. `key` is the setting that names the datasets."""
    for name in split_weights(dataset):
        if name not in BUILT_IN and not is_hub_name(name):
            check_dataset_exists(Path(name), f"{key}={name!r}")


def is_hub_name(dataset: str) -> bool:
    """Return whether `dataset` has the form user/name, user/name:config or user/name:config:split,
    and is not an existing path. `config` may be empty."""
    path = Path(dataset)
    is_hub_form = _HUB_NAME.fullmatch(dataset) is not None
    return is_hub_form and path.suffix not in SUFFIXES and not path.exists()


def _build_source(files: Sequence[Path], what: str, columns: Mapping[str, str]) -> Source:
    """Return the running text or records in `files` as a source. Raises UserError if record files
    contain no records, or if the first record has no known form."""
    if files[0].suffix in TEXT_SUFFIXES:
        return Source(files=files)
    # As in `load_dataset`, only the most common format is read. Another one may repeat the records.
    formats = [file.suffix.replace("jsonl", "json") for file in files]
    read_format = max(_FORMATS, key=formats.count)
    files = [file for file, name in zip(files, formats, strict=True) if name == read_format]
    source = Source(files=files, columns=columns)
    for where, record in source.read_records():
        read_record(record, where, columns)
        return source
    raise UserError(f"{what} contains no text", fix="use files with at least one record")


def read_embedded() -> list[str]:
    """Return the source files and pydoc topics of the standard library, in an order that depends
    only on their names."""
    from pydoc_data.topics import topics

    root = Path(sysconfig.get_path("stdlib"))
    texts = {f"topic/{name}": text for name, text in topics.items()}
    for folder, subfolders, files in os.walk(root):
        # Changing the list in place keeps os.walk out of the skipped folders.
        subfolders[:] = [
            name for name in subfolders if name not in _SKIPPED_FOLDERS and name[:7] != "config-"
        ]
        for file in files:
            if file.endswith(".py"):
                path = Path(folder, file)
                name = path.relative_to(root).as_posix()
                texts[name] = path.read_text(encoding="utf-8", errors="replace")
    return [text for text in _shuffle(texts) if text.strip()]


def read_prose() -> list[str]:
    """Return the prose of the pydoc topics, one paragraph per line, without code, grammar, tables
    or titles.

    Some topics repeat paragraphs of other topics, so each paragraph is used only once. Otherwise,
    the training text would also contain validation text."""
    from pydoc_data.topics import topics

    texts = list[str]()
    seen = set[str]()
    for text in _shuffle(topics):
        prose = ""
        for paragraph in re.split(r"\n\s*\n", text):
            line = " ".join(paragraph.split())
            if _PROSE_PARAGRAPH.fullmatch(line) and line not in seen:
                seen.add(line)
                prose += f"{line}\n"
        if prose:
            texts.append(prose)
    return texts


def _shuffle(texts: dict[str, str]) -> list[str]:
    """Return the texts sorted by a hash of their names. The last texts are held out for validation,
    and this order makes them a representative mixture."""

    names = sorted(texts, key=lambda name: hashlib.sha256(name.encode()).digest())
    return [texts[name] for name in names]
