"""Where text comes from: local files and folders, the Hub, Python's own sources. No torch."""

import hashlib
import itertools
import os
import re
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from distributed_training.data import hub, pieces
from distributed_training.data.chats.records import COLUMNS, Shape
from distributed_training.data.files import (  # fmt: skip
    BLOCK,
    RECORDS,
    TEXTS,
    bomb,
    most_unpacked,
    open_file,
    read_records,
    read_text,
    suffix_of,
)
from distributed_training.data.folders import ABOUT, CARD, find_splits
from distributed_training.data.pieces import RUNNING, Piece
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import shown

EMBEDDED = "embedded"
PROSE = "embedded-prose"
WIKITEXT = "wikitext-2"
_KINDS = (*TEXTS, *RECORDS)
# A paragraph from a capital letter to a full stop or colon, without code or grammar.
_SENTENCES = re.compile(r"(?!.*(?:::=|>>>|\*\*\*|===))[A-Z].{60,}[.:]")
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(:[\w.-]+)?")
# Standard library folders that hold tests, vendored code or generated tables, not prose or code.
_SKIPPED = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "__pycache__"}
_SKIPPED |= {"ensurepip", "encodings", "pydoc_data", "turtledemo"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The texts of a split, in files that are read anew each time, or in memory."""

    form: str  # RUNNING, where a padded sample is a line; else that of the records
    files: Sequence[Path] = ()
    texts: Sequence[str] = ()
    shape: Shape | None = None  # of the records

    @property
    def num_bytes(self) -> int:
        """About as long as the text is; Parquet is compressed."""
        return sum(file.stat().st_size for file in self.files) + sum(map(len, self.texts))

    def read_texts(self, *, by_line: bool, can_cut: bool = True) -> Iterator[Piece]:
        """Running text in pieces, in its order; if asked, line by line."""
        read = partial(read_text, by_line=by_line)
        cut = pieces.cut_lines if by_line else partial(pieces.cut_text, can_cut=can_cut)
        for parts in itertools.chain(map(read, self.files), ([text] for text in self.texts)):
            yield from cut(parts)

    def read_records(self) -> Iterator[tuple[str, Any]]:
        """(where it is, record), in their order."""
        assert self.shape is not None
        return read_records(*self.files, columns={*COLUMNS, *self.shape.columns.values()})

    def digest(self) -> str:
        """SHA-256 of form and contents."""
        columns = self.shape.columns if self.shape else {}
        digest = hashlib.sha256(f"{self.form} {sorted(columns.items())}".encode())
        for file in self.files:
            own = hashlib.sha256()
            left = most_unpacked(file)
            try:
                with open_file(file) as opened:
                    for block in iter(partial(opened.read, BLOCK), b""):
                        own.update(block)
                        left -= len(block)
                        if left < 0:
                            raise bomb(file)
            except OSError as error:  # such as a packed file that is cut
                why = error.strerror or str(error)
                raise UserError(f"dataset file {file} cannot be read", why) from None
            digest.update(own.digest())
        for text in self.texts:
            data = text.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.hexdigest()


# By split: "train", and "validation" where there is one of its own.
Corpus = dict[str, Source]


def fingerprint(corpus: Corpus) -> str:
    """SHA-256 over all contents and the split, for which all is read."""
    splits = ("train", "validation")
    digests = [corpus[split].digest() if split in corpus else "" for split in splits]
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def read_corpus(dataset: str, validation: str | None = None, columns: str | None = None) -> Corpus:
    """Find a resolved `dataset`, and another for validation; the texts are read later. `columns`:
    ours=theirs, .... Raises UserError for one that is missing, empty or of an unsupported kind."""
    names = parse_columns(columns)
    corpus = _find_corpus(dataset, "dataset", names)
    if validation is not None:
        own = _find_corpus(validation, "validation_dataset", names)
        corpus["validation"] = own.get("validation", own["train"])
    return corpus


def find_unread(dataset: str, corpus: Corpus) -> list[str]:
    """Return the files in a dataset's folder that are in no split that is used, but for hidden ones
    and those about the dataset, as names below it."""
    folder = Path(dataset)
    if not corpus["train"].files or not folder.is_dir():
        return []
    used = {file for source in corpus.values() for file in source.files}
    about = ABOUT if any(suffix_of(file) not in TEXTS for file in used) else ABOUT - {CARD}
    unread = [
        file
        for file in folder.rglob("*")
        if file not in used and file.is_file() and file.name not in about
    ]
    # Links lead to files by other names. Resolving takes long for many files, so few are resolved.
    resolved = {file.resolve() for file in used} if unread else set()
    names = sorted(file.relative_to(folder) for file in unread if file.resolve() not in resolved)
    return [
        name.as_posix()
        for name in names
        if not any(part.startswith((".", "__")) for part in name.parts)
    ]


def parse_columns(text: str | None) -> dict[str, str]:
    """`prompt=question,completion=answer` by our names. Raises UserError for anything else."""
    pairs = [pair.partition("=") for pair in text.split(",")] if text else []
    names = {ours.strip(): theirs.strip() for ours, _, theirs in pairs}
    wrong = [ours for ours, theirs in names.items() if ours not in COLUMNS or not theirs]
    if wrong:
        what = f"columns={shown(text)} is not accepted"
        why = f"{wrong[0]!r} is no column that is read: {', '.join(COLUMNS)}"
        raise UserError(what, why, "write --columns prompt=question,completion=answer")
    return names


def _find_corpus(dataset: str, key: str, columns: Mapping[str, str]) -> Corpus:
    what = f"{key}={dataset!r}"
    if dataset in (EMBEDDED, PROSE):
        texts = read_embedded() if dataset == EMBEDDED else read_prose()
        return {"train": Source(form=RUNNING, texts=texts)}
    if dataset == WIKITEXT:
        try:
            parquet = hub.fetch_wikitext()
        except OSError as error:
            raise hub.cannot_fetch(key, WIKITEXT, error, hub.WIKITEXT_COMMAND) from None
        corpus = {}
        for split, path in parquet.items():
            lines = "".join(row["text"] for _, row in read_records(path))
            # An article begins at ` = Title = `.
            articles = re.split(r"(?m)^(?= *= [^=\n].* = *$)", lines)
            texts = [text for text in articles if text.strip()]
            corpus[split] = Source(form=RUNNING, texts=texts)
        return corpus
    if is_hub_name(dataset):
        splits = hub.ask_for_dataset(key, dataset, download=True)
    else:
        splits = find_splits(Path(dataset), what)
    if "train" not in splits:
        fix = "give the file or folder to train on itself"
        raise UserError(f"{what} has no split called train", f"it has {', '.join(splits)}", fix)
    used = [split for split in ("train", "validation") if split in splits]
    return {split: _find_form(splits[split], what, columns) for split in used}


def is_hub_name(dataset: str) -> bool:
    """Whether this is user/name or user/name:config, and no path."""
    path = Path(dataset)
    named = _HUB_NAME.fullmatch(dataset) is not None
    return named and suffix_of(path) not in _KINDS and not path.exists()


def _find_form(files: Sequence[Path], what: str, columns: Mapping[str, str]) -> Source:
    """Running text, or records, all of the shape of the first."""
    suffixes = sorted({suffix_of(file) for file in files})
    if set(suffixes) <= set(TEXTS):
        return Source(form=RUNNING, files=files)
    if not set(suffixes) <= set(RECORDS):
        fix = f"give {' and '.join(TEXTS)} files, or {', '.join(RECORDS)} files, not both"
        raise UserError(f"{what} cannot be read", f"found {', '.join(suffixes)}", fix)
    for where, record in read_records(*files, columns={*COLUMNS, *columns.values()}):
        shape = Shape(record, where, columns)
        return Source(form=shape.form, files=files, shape=shape)
    raise UserError(f"{what} contains no text")


def read_embedded() -> list[str]:
    """The standard library's sources and its pydoc topics, in an order fixed by their names."""
    from pydoc_data.topics import topics

    root = Path(sysconfig.get_path("stdlib"))
    texts = {f"topic/{name}": text for name, text in topics.items()}
    for folder, below, files in os.walk(root):  # installed packages are not even walked through
        below[:] = [name for name in below if name not in _SKIPPED and name[:7] != "config-"]
        for path in (Path(folder, name) for name in files if name.endswith(".py")):
            name = path.relative_to(root).as_posix()
            texts[name] = path.read_text(encoding="utf-8", errors="replace")
    return [text for text in _shuffle(texts) if text.strip()]


def read_prose() -> list[str]:
    """The sentences of the pydoc topics, a paragraph a line: no code, grammar, tables or titles.
    Topics repeat each other, which would put what validates into what trains: each comes once."""
    from pydoc_data.topics import topics

    found = list[str]()
    seen = set[str]()
    for text in _shuffle(topics):
        parts = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
        new = [part for part in dict.fromkeys(parts) if _SENTENCES.fullmatch(part)]
        found.append("".join(f"{part}\n" for part in new if part not in seen))
        seen.update(new)
    return [text for text in found if text]


def _shuffle(texts: dict[str, str]) -> list[str]:
    """Ordered by a hash of the name, so that the held-out end is not all of one kind."""
    names = sorted(texts, key=lambda name: hashlib.sha256(name.encode()).digest())
    return [texts[name] for name in names]
