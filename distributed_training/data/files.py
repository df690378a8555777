"""Read text files in blocks, and record files record by record, to save memory. Only .json files
are read as a whole. This module does not import torch."""

import codecs
import contextlib
import csv
import hashlib
import io
import shlex
import sys
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from pydantic_core import from_json

from distributed_training.settings.errors import UserError, first_line
from distributed_training.settings.files import require_regular

TEXT_SUFFIXES = (".txt", ".md")  # each file is one document
# Each line or row is one record.
RECORD_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
BLOCK_SIZE = 2**20  # bytes or characters read at a time
_BATCH_ROWS = 16  # rows of a Parquet table decoded at a time


def sha256_of(stream: IO[bytes]) -> bytes:
    """Return the SHA-256 of a file's contents. (hashlib.file_digest needs Python 3.11.)"""
    digest = hashlib.sha256()
    for block in iter(partial(stream.read, BLOCK_SIZE), b""):
        digest.update(block)
    return digest.digest()


def read_text(path: Path, *, by_line: bool = False) -> Iterator[str]:
    """Yield the text of a file in blocks, or line by line if `by_line` is set. The file must be
    encoded in UTF-8. Line ends are read as by Python's `open`: CRLF and CR become LF. Raises
    UserError if the file has another encoding or cannot be read."""
    with open_file(path) as file:
        text = io.TextIOWrapper(file, "utf-8-sig")
        read = text.readline if by_line else partial(text.read, BLOCK_SIZE)
        try:
            first = read()
            if "\0" in first[:4]:
                encoding = "UTF-16BE" if first[0] == "\0" else "UTF-16LE"
                raise _not_utf8(path, "its first bytes include zero bytes", encoding)
            if first:
                yield first
            yield from iter(read, "")
        except UnicodeDecodeError as error:
            if error.object.startswith(b"\x1f\x8b"):
                what = f"dataset file {path} cannot be read"
                raise UserError(what, "it is compressed", "decompress it with gunzip") from None
            text_before = error.object[: error.start][-20:].decode("ascii", "replace")
            byte = f"0x{error.object[error.start]:02x}"
            why = f"the byte {byte} after {text_before!r} is not valid UTF-8"
            has_mark = error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
            encoding = "UTF-16" if has_mark else "LATIN1"
            raise _not_utf8(path, why, encoding) from None


def read_records(*paths: Path, columns: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield (location of the record for error messages, record) for each line or row of the files.
    Of Parquet and Arrow files, only `columns` are read, and the values of other columns are
    `...`. Raises UserError if a file cannot be parsed."""
    table = partial(_read_table, columns=columns)
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv}
    for path in paths:
        yield from readers.get(path.suffix, table)(path)


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(read_text(path, by_line=True), 1):
        if line.strip():
            where = f"{path} line {number}"
            try:
                yield where, from_json(line.strip("\ufeff\n"))  # joined files
            except ValueError as error:
                why = str(error).replace("line 1 column", "column")
                fix = "write each record on one line, or name a file with one list .json"
                raise UserError(f"{where} is not valid JSON", why, fix) from None


def _read_json(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (location, record) for each record in a JSON file. The file may contain a list of
    records, a single record, or JSON Lines. Unlike other files, it is read as a whole, which needs
    about six times its size in RAM."""
    text = "".join(read_text(path))
    try:
        value = from_json(text)
    except ValueError as error:
        if not text.lstrip().startswith("["):
            yield from _read_jsonl(path)
            return
        raise UserError(f"{path} is not JSON", str(error)) from None
    records = value if isinstance(value, list) else [value]
    for number, record in enumerate(records, 1):
        yield f"{path} record {number}", record


def _read_csv(path: Path) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(sys.maxsize)
    rows = csv.DictReader(read_text(path, by_line=True), strict=True)
    try:
        names = rows.fieldnames or ()
        for name in names:
            if name and names.count(name) > 1:
                raise UserError(f"{path} has two columns named {name!r}", fix="rename one")
        for row in rows:
            where = f"{path} line {rows.line_num}"
            if None in row or None in row.values():
                what = f"{where} does not have the {len(names)} fields of the header"
                raise UserError(what, fix='put text that contains a comma in quotes: "one, two"')
            yield where, row
    except csv.Error as error:
        where = f"{path} line {rows.line_num + 1}"
        raise UserError(f"{where} is not CSV", str(error)) from None


def _read_table(path: Path, columns: Collection[str]) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.memory_map(str(path)) as file:
            if path.suffix == ".parquet":
                table = pyarrow.parquet.ParquetFile(file)
                unread = dict.fromkeys(table.schema_arrow.names, ...)
                batches = table.iter_batches(_BATCH_ROWS, columns=[*columns])
            elif file.read(6) == b"ARROW1":
                what = f"{path} is an Arrow file, not a stream as written by the datasets library"
                raise UserError(what, fix="convert it to Parquet")
            else:  # a stream, as written by the datasets library
                file.seek(0)
                table = pyarrow.ipc.open_stream(file)
                unread = dict.fromkeys(table.schema.names, ...)
                batches = iter(table)
            for batch in batches:
                batch = batch.select([name for name in batch.schema.names if name in columns])
                if path.suffix == ".arrow":  # wrong offsets could point outside the file's memory
                    batch.validate(full=True)
                for row in batch.to_pylist():
                    number += 1
                    for field in batch.schema:
                        row[field.name] = _decode(row[field.name], field.type, field.name)
                    yield f"{path} row {number}", unread | row
    except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:
        why = first_line(error)
        raise UserError(f"{path} cannot be read as {path.suffix[1:]}", why) from None


def _decode(value: Any, cls: Any, column: str) -> Any:
    """Return a value of the Arrow type `cls`, with the type `Json` of the datasets library decoded.

    Null members of nested records are left out. A table adds them for members that occur only in
    other rows, and templates would render them as None. Raises ValueError for types that have no
    counterpart in JSON, such as maps."""
    import pyarrow

    if value is None:
        return None
    if isinstance(value, dict):
        members = {}
        for field in cls:
            member = _decode(value[field.name], field.type, column)
            # An answer with null content is not trained on.
            if member is not None or field.name in ("content", "value"):
                members[field.name] = member
        return members
    if isinstance(cls, pyarrow.JsonType):
        return from_json(value)
    if isinstance(cls, pyarrow.BaseExtensionType | pyarrow.MapType | pyarrow.UnionType):
        raise ValueError(f"the column {column} has the Arrow type {cls}")
    if isinstance(value, list):
        return [_decode(member, cls.value_type, column) for member in value]
    return value


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading. Raises UserError if the file is not a regular file or cannot be
    read."""
    try:
        require_regular(path, "dataset file")
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise UserError(f"dataset file {path} cannot be read", error.strerror or "") from None


def _not_utf8(path: Path, why: str, encoding: str) -> UserError:
    copy = path.with_suffix(f".utf8{path.suffix}")
    command = f"iconv -f {encoding} -t UTF-8 {shlex.quote(str(path))} -o {shlex.quote(str(copy))}"
    fix = f"convert it to UTF-8. If it is {encoding}, run: {command}"
    return UserError(f"dataset file {path} cannot be read", why, fix)
