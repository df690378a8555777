"""Where text comes from (local files, the Hub, Python's own sources) and how it is read: decoded,
in lines, in records; never more than a block or a record of a user's file at a time. No torch."""

import codecs
import csv
import hashlib
import io
import itertools
import json
import os
import re
import shlex
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from distributed_training.data import hub, pieces
from distributed_training.data.pieces import RUNNING, ChatTemplate, Piece
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import parse_json

EMBEDDED = "embedded"
PROSE = "embedded-prose"
WIKITEXT = "wikitext-2"
_TEXTS = (".txt", ".md")  # a file is one text
_RECORDS = (".jsonl", ".csv", ".parquet")  # a line or a row is one record
_KINDS = (*_TEXTS, *_RECORDS)
_COLUMNS = ("text", "prompt", "completion", "messages")  # those of records that are read
_BLOCK = 2**20  # bytes, or characters
_ROWS = 16  # of a table, decoded at a time: a file of 1 MB may have rows of 10 MB
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

    @property
    def num_bytes(self) -> int:
        """About as long as the text is; Parquet is compressed."""
        return sum(file.stat().st_size for file in self.files) + sum(map(len, self.texts))

    def read(self, *, by_line: bool, chat: ChatTemplate | None = None) -> Iterator[Piece]:
        """What is tokenised, in its order; of running text, where asked, line by line, of questions
        and answers through the model's template."""
        if self.form == RUNNING:
            read = partial(read_text, by_line=by_line)
            cut = pieces.cut_lines if by_line else pieces.cut_text
            for parts in itertools.chain(map(read, self.files), ([text] for text in self.texts)):
                yield from cut(parts)
        else:
            for where, record in read_records(*self.files):
                yield from pieces.cut_record(record, self.form, where, chat)

    def digest(self) -> str:
        """SHA-256 of form and contents."""
        digest = hashlib.sha256(self.form.encode())
        for file in self.files:
            own = hashlib.sha256()
            with _open(file) as opened:
                for block in iter(partial(opened.read, _BLOCK), b""):
                    own.update(block)
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


def read_corpus(dataset: str, validation: str | None = None) -> Corpus:
    """Find a resolved `dataset`, and another for validation; the texts are read later. Raises
    UserError for one that is missing, empty or of an unsupported kind."""
    corpus = _find_corpus(dataset, "dataset")
    if validation is not None:
        own = _find_corpus(validation, "validation_dataset")
        corpus["validation"] = own.get("validation", own["train"])
    return corpus


def _find_corpus(dataset: str, key: str) -> Corpus:
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
        if "train" not in splits:
            raise UserError(f"{what} has no split called train", f"it has {', '.join(splits)}")
        used = [split for split in ("train", "validation") if split in splits]
        return {split: _find_form(splits[split], what) for split in used}
    return {"train": _find_source(Path(dataset), what)}


def is_hub_name(dataset: str) -> bool:
    """Whether this is user/name or user/name:config, and no path."""
    path = Path(dataset)
    named = _HUB_NAME.fullmatch(dataset) is not None
    return named and path.suffix not in _KINDS and not path.exists()


def _find_source(path: Path, what: str) -> Source:
    if not path.is_file() and not path.is_dir():
        why = "is not a regular file" if path.exists() else "does not exist"
        fix = f'give a {", ".join(_KINDS)} file, a folder of them, "wikitext-2" or "embedded"'
        raise UserError(f"{what} {why}", fix=fix)
    files = [path]
    if path.is_dir():  # in the order of their names, but for hidden ones
        below = [file for file in sorted(path.rglob("*")) if file.suffix in _KINDS]
        shown = [file for file in below if "/." not in f"/{file.relative_to(path).as_posix()}"]
        files = [file for file in shown if not file.is_dir()]
    found = sorted({file.suffix or "a file without an extension" for file in files})
    are_texts = set(found) <= set(_TEXTS)
    if not files or not (are_texts or set(found) <= set(_RECORDS)):
        why = f"found {', '.join(found) or 'no ' + ' or '.join(_KINDS) + ' file'}"
        fix = f"give {' and '.join(_TEXTS)} files, or {', '.join(_RECORDS)} files, not both"
        raise UserError(f"{what} cannot be read", why, fix)
    for file in files:
        _open(file).close()
    return Source(form=RUNNING, files=files) if are_texts else _find_form(files, what)


def _find_form(files: Sequence[Path], what: str) -> Source:
    """Records, all of the form of the first."""
    for where, record in read_records(*files):
        return Source(form=pieces.find_form(record, where), files=files)
    raise UserError(f"{what} contains no text")


def read_text(path: Path, *, by_line: bool = False) -> Iterator[str]:
    """The text, a block or a line at a time: UTF-8, or UTF-16 with its byte order mark; CRLF
    becomes LF. Raises UserError for any other encoding."""
    with _open(path) as file:
        head = file.read(4)
        if head.count(0) > 1:
            encoding = "UTF-16LE" if head[0] else "UTF-16BE"
            raise _not_utf8(path, "it begins with zeros", encoding, "UTF-16 without its mark")
        file.seek(0)
        marked = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        # A separator such as U+2028 may occur inside a JSON string: lines end at line feeds.
        text = io.TextIOWrapper(file, "utf-16" if marked else "utf-8-sig", newline="\n")
        try:
            for part in text if by_line else iter(partial(text.read, _BLOCK), ""):
                while part.endswith("\r") and (more := text.read(1)):
                    part += more
                yield part.replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            start = error.start
            before = error.object[max(0, start - 20) : start].decode("ascii", "replace")
            why = f"{error.encoding}: {error.reason}, 0x{error.object[start]:02x} after {before!r}"
            raise _not_utf8(path, why, "LATIN1", "Latin-1") from None


def read_records(*paths: Path) -> Iterator[tuple[str, Any]]:
    """(where it is, record) of each line or row. Raises UserError for what cannot be parsed."""
    for path in paths:
        yield from {".jsonl": _read_jsonl, ".csv": _read_csv}.get(path.suffix, _read_table)(path)


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(read_text(path, by_line=True), 1):
        if line.strip():
            where = f"{path} line {number}"
            try:
                yield where, parse_json(line.removesuffix("\n"))
            except json.JSONDecodeError as error:
                raise UserError(f"{where} column {error.colno} is not JSON", error.msg) from None
            except ValueError as error:
                raise UserError(f"{where} cannot be read", str(error)) from None


def _read_csv(path: Path) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(sys.maxsize)
    rows = csv.DictReader(read_text(path, by_line=True), strict=True)
    try:
        for row in rows:
            where = f"{path} line {rows.line_num}"
            if None in row:
                fix = 'put a text with a comma in it into quotes: "one, two"'
                raise UserError(f"{where} has more fields than the heading", fix=fix)
            yield where, row
    except csv.Error as error:
        where = f"{path} line {rows.line_num + 1}"
        raise UserError(f"{where} is not CSV", str(error)) from None


def _read_table(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.memory_map(str(path)) as file:
            if path.suffix == ".arrow":  # what the datasets library keeps
                batches = iter(pyarrow.ipc.open_stream(file))
            else:
                table = pyarrow.parquet.ParquetFile(file)
                names = [name for name in table.schema_arrow.names if name in _COLUMNS]
                batches = table.iter_batches(_ROWS, columns=names or None)
            for batch in batches:
                for first in range(0, batch.num_rows, _ROWS):
                    for row in batch.slice(first, _ROWS).to_pylist():
                        number += 1
                        yield f"{path} row {number}", row
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        why = str(error).strip().partition("\n")[0]
        raise UserError(f"{path} is not a {path.suffix[1:]} file", why) from None


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(f"dataset file {path} cannot be read", error.strerror or "") from None


def _not_utf8(path: Path, why: str, encoding: str, name: str) -> UserError:
    copy = path.with_suffix(f".utf8{path.suffix}")
    command = shlex.join(["iconv", "-f", encoding, "-t", "UTF-8", str(path), "-o", str(copy)])
    fix = f"give UTF-8; if it is {name}: {command}"
    return UserError(f"dataset file {path} cannot be read", why, fix)


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
