"""Files of texts and of records, decoded and parsed, in little memory. No torch."""

import codecs
import csv
import io
import json
import shlex
import sys
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from distributed_training.settings.errors import UserError
from distributed_training.settings.files import parse_json

TEXTS = (".txt", ".md")  # a file is one text
RECORDS = (".jsonl", ".json", ".csv", ".parquet", ".arrow")  # a line or a row is one record
COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
BLOCK = 2**20  # bytes, or characters
_UNPACKED = 2**27  # bytes that a packed file may unpack to
_RATIO = 200  # or so many times its size
_ROWS = 16  # of a table, decoded at a time: a file of 1 MB may have rows of 10 MB


def suffix_of(path: Path) -> str:
    """The suffix that says what a file is: .jsonl of a.jsonl.gz."""
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def read_text(path: Path, *, by_line: bool = False) -> Iterator[str]:
    """The text, a block or a line at a time: UTF-8, or UTF-16 with its byte order mark; CRLF
    becomes LF. Raises UserError for any other encoding."""
    try:
        with open_file(path) as file:
            head = file.read(4)
    except OSError as error:  # compressed data that is damaged
        raise UserError(f"dataset file {path} cannot be read", str(error)) from None
    if head.count(0) > 1:
        encoding = "UTF-16LE" if head[0] else "UTF-16BE"
        raise _not_utf8(path, "it begins with zeros", encoding, "UTF-16 without its mark")
    marked = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    with open_file(path) as file:
        # A separator such as U+2028 may occur inside a JSON string: lines end at line feeds.
        text = io.TextIOWrapper(file, "utf-16" if marked else "utf-8-sig", newline="\n")
        most = most_unpacked(path)
        taken = 0
        try:
            packed_line = path.suffix in COMPRESSED  # it may be all that there is
            lines = iter(partial(text.readline, most + 1), "") if packed_line else text
            for part in lines if by_line else iter(partial(text.read, BLOCK), ""):
                taken += len(part)
                if taken > most:
                    raise bomb(path)
                while part.endswith("\r") and (more := text.read(1)):
                    part += more
                yield part.replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            start = error.start
            before = error.object[max(0, start - 20) : start].decode("ascii", "replace")
            why = f"{error.encoding}: {error.reason}, 0x{error.object[start]:02x} after {before!r}"
            raise _not_utf8(path, why, "LATIN1", "Latin-1") from None
        except (OSError, EOFError) as error:
            raise UserError(f"dataset file {path} cannot be read", str(error)) from None


def read_records(*paths: Path, columns: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """(where it is, record) of each line or row; of a table only these `columns`, if it has any of
    them. Raises UserError for what cannot be parsed."""
    table = partial(_read_table, columns=columns)
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv}
    for path in paths:
        yield from readers.get(suffix_of(path), table)(path)


def has_added_nulls(path: Path) -> bool:
    """Whether a file is a table, whose nested records all have each other's members, as nulls."""
    return suffix_of(path) in (".parquet", ".arrow")


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


def _read_json(path: Path) -> Iterator[tuple[str, Any]]:
    """A list of records; or lines of them, under the wrong name."""
    head = next(read_text(path), "").lstrip()
    if not head.startswith("["):
        try:
            value = parse_json("".join(read_text(path)))
        except ValueError:
            yield from _read_jsonl(path)
            return
        yield f"{path} record 1", value
        return
    try:
        rows = parse_json("".join(read_text(path)))
    except json.JSONDecodeError as error:
        where = f"{path} line {error.lineno} column {error.colno}"
        raise UserError(f"{where} is not JSON", error.msg) from None
    except ValueError as error:
        raise UserError(f"{path} cannot be read", str(error)) from None
    for number, row in enumerate(rows, 1):
        yield f"{path} record {number}", row


def _read_csv(path: Path) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(sys.maxsize)
    rows = csv.DictReader(read_text(path, by_line=True), strict=True)
    try:
        for row in rows:
            where = f"{path} line {rows.line_num}"
            if None in row:
                fix = 'put a text with a comma in it into quotes: "one, two"'
                raise UserError(f"{where} has more fields than the heading", fix=fix)
            missing = [name for name, value in row.items() if value is None]
            if missing:
                raise UserError(f"{where} has fewer fields than the heading", f"no {missing[0]!r}")
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
            if path.suffix == ".arrow":  # what the datasets library keeps
                batches = iter(pyarrow.ipc.open_stream(file))
            else:
                table = pyarrow.parquet.ParquetFile(file)
                rows = _rows_at_a_time(table, path)
                names = [name for name in table.schema_arrow.names if name in columns]
                batches = table.iter_batches(rows, columns=names or None)
            taken = 0
            for batch in batches:
                taken += batch.nbytes
                if taken > most_unpacked(path):
                    raise bomb(path)
                for first in range(0, batch.num_rows, _ROWS):
                    for row in batch.slice(first, _ROWS).to_pylist():
                        number += 1
                        yield f"{path} row {number}", row
    except UserError:
        raise
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        why = str(error).strip().partition("\n")[0]
        raise UserError(f"{path} cannot be read as {path.suffix[1:]}", why) from None


def _rows_at_a_time(table: Any, path: Path) -> int:
    """Return how many rows can be decoded at a time: one if a few values may be most of a column's
    chunk, as a repeated value is stored once. Raises UserError if a chunk is far larger."""
    metadata = table.metadata
    num_bytes = path.stat().st_size
    if metadata.num_rows > max(10**6, num_bytes):  # of one value, which takes no room at all
        raise bomb(path)
    largest = 0
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            column = metadata.row_group(group).column(number)
            largest = max(largest, column.total_uncompressed_size)
            if largest > most_unpacked(path):
                raise bomb(path)
    return 1 if largest > 4 * num_bytes + _UNPACKED // _ROWS else _ROWS


def most_unpacked(path: Path) -> int:
    """Return how many bytes a file may unpack to: texts are packed to a tenth at best."""
    return max(_UNPACKED, _RATIO * path.stat().st_size)


def bomb(path: Path) -> UserError:
    """The refusal of a file that unpacks to more."""
    why = f"it unpacks to more than {_RATIO} times its size"
    return UserError(f"dataset file {path} cannot be read", why, "give its content as .jsonl")


def open_file(path: Path) -> IO[bytes]:
    """A file's content, decompressed. Raises UserError if it is none that can be read."""
    try:
        # Files in /proc and /sys count as regular, but reading one may block or never end.
        if not path.is_file() or path.resolve().parts[1:2] in (("proc",), ("sys",)):
            what = f"dataset file {path} is not a regular file"
            raise UserError(what, fix="give a copy of its content")
        if path.suffix in COMPRESSED:
            import pyarrow

            return pyarrow.input_stream(str(path), compression=COMPRESSED[path.suffix])
        return path.open("rb")
    except OSError as error:
        raise UserError(f"dataset file {path} cannot be read", error.strerror or "") from None


def _not_utf8(path: Path, why: str, encoding: str, name: str) -> UserError:
    copy = path.with_suffix(f".utf8{path.suffix}")
    command = shlex.join(["iconv", "-f", encoding, "-t", "UTF-8", str(path), "-o", str(copy)])
    fix = f"give UTF-8; if it is {name}, run: {command}"
    return UserError(f"dataset file {path} cannot be read", why, fix)
