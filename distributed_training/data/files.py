"""The text in a user's file as a stream: decoded, in lines, in records. No torch import.

Nothing here holds more than a block of a file, or one record, in memory.
"""

import codecs
import csv
import io
import json
import shlex
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from distributed_training.settings.errors import UserError
from distributed_training.settings.files import parse_json

TEXT_KINDS = (".txt", ".md")  # a file is one text
RECORD_KINDS = (".jsonl", ".csv", ".parquet")  # a line or a row is one record
ARROW = ".arrow"  # what the datasets library keeps; rows are records
COLUMNS = ("text", "prompt", "completion", "messages")  # those of records that are read
_BLOCK = 2**20  # bytes, or characters
_ROWS = 16  # of a table, decoded at a time: a file of 1 MB may have rows of 10 MB
_QUOTES = 'put a text with a comma in it into quotes: "one, two"'


def check_file(path: Path) -> None:
    """Raise UserError unless this is a regular file that may be read."""
    if not path.is_file():
        what = f"dataset file {path} is not a regular file"
        raise UserError(what, "a pipe, socket or device can be read only once", "copy it to a file")
    _open(path).close()


def read_bytes(path: Path) -> Iterator[bytes]:
    """The contents, a block at a time."""
    with _open(path) as file:
        yield from iter(partial(file.read, _BLOCK), b"")


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
                raise UserError(f"{where} has more fields than the heading", fix=_QUOTES)
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
            if path.suffix == ARROW:
                batches = iter(pyarrow.ipc.open_stream(file))
            else:
                table = pyarrow.parquet.ParquetFile(file)
                names = [name for name in table.schema_arrow.names if name in COLUMNS]
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
