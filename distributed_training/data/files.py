"""Read text files in blocks, and record files record by record, to save memory. Only .json files
are read as a whole. This module does not import torch."""

import codecs
import csv
import io
import json
import os
import resource
import shlex
import sys
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from distributed_training.settings.errors import UserError, first_line
from distributed_training.settings.files import json_mistake, parse_json
from distributed_training.settings.machine import available_ram_bytes

TEXT_SUFFIXES = (".txt", ".md")  # each file is one document
# Each line or row is one record.
RECORD_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
BLOCK_SIZE = 2**20  # bytes or characters read at a time
# A file may unpack to at most _UNPACKED_BYTES or _UNPACKED_RATIO times its size, whichever is
# larger.
_UNPACKED_BYTES = 2**27
_UNPACKED_RATIO = 200
_MAX_LINE_LENGTH = 2**30  # maximum number of characters in a line
# Memory that a .json file needs for two copies of its text and for the values, in bytes per byte of
# the file
_JSON_BYTES = 6
_BATCH_ROWS = 16  # rows of a table decoded at a time; a file of 1 MB may have rows of 10 MB


def suffix_of(path: Path) -> str:
    """Return the suffix that determines the format of a file, such as .jsonl for a.jsonl.gz."""
    return Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix


def read_text(path: Path, *, by_line: bool = False) -> Iterator[str]:
    """Yield the text of a file in blocks, or line by line if `by_line` is set. The file must be
    encoded in UTF-8, or in UTF-16 with a byte-order mark. CRLF is converted to LF. Raises UserError
    if the file has another encoding or cannot be read."""
    encoding = encoding_of(path)
    with open_file(path) as file:
        # Lines end only at line feeds, because U+2028 and similar characters may occur inside a
        # JSON string.
        text = io.TextIOWrapper(file, encoding, newline="\n")
        limit = max_unpacked_bytes(path)
        max_chars = min(limit, _MAX_LINE_LENGTH)  # The whole file may be one line.
        size = 0
        try:
            read = (
                partial(text.readline, max_chars + 1) if by_line else partial(text.read, BLOCK_SIZE)
            )
            for block in iter(read, ""):
                size += len(block)
                if size > limit:
                    raise bomb_error(path)
                if by_line and len(block) > max_chars:
                    why = f"a line has more than {max_chars / 1e6:,.0f} million characters"
                    raise UserError(f"dataset file {path} cannot be read", why, "split this line")
                while block.endswith("\r") and (following := text.read(1)):
                    block += following
                yield block.replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            start = error.start
            text_before = error.object[max(0, start - 20) : start].decode("ascii", "replace")
            byte = f"the byte 0x{error.object[start]:02x} after {text_before!r}"
            why = f"{byte} is not valid {error.encoding.upper()}"
            raise _not_utf8(path, why, "LATIN1", "Latin-1") from None
        except (OSError, EOFError) as error:
            raise UserError(f"dataset file {path} cannot be read", str(error)) from None


def encoding_of(path: Path) -> str:
    """Return Python's name for the encoding of a text file, based on its first bytes. Raises
    UserError if the encoding is not supported, or if part of the file was never written."""
    try:
        with open_file(path) as file:
            # Reading a sparse file of 50 GB would take minutes.
            if (
                path.suffix not in COMPRESSIONS
                and (hole := _first_hole(file)) < path.stat().st_size
            ):
                why = f"part of the file, starting at byte {hole:,}, was never written"
                raise UserError(f"dataset file {path} cannot be read", why, "copy the file again")
            head = file.read(4)
    except OSError as error:  # damaged compressed data
        raise UserError(f"dataset file {path} cannot be read", str(error)) from None
    if head.count(0) > 1:
        encoding = "UTF-16LE" if head[0] else "UTF-16BE"
        raise _not_utf8(
            path, "its first bytes include zero bytes", encoding, "UTF-16 without a byte-order mark"
        )
    has_mark = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return "utf-16" if has_mark else "utf-8-sig"


def _first_hole(file: IO[bytes]) -> int:
    """Return the byte offset of the first hole in a sparse file, or the size of the file if there
    is no hole."""
    descriptor = file.fileno()
    try:
        return os.lseek(descriptor, 0, os.SEEK_HOLE)
    except OSError:  # the file is empty, or the file system does not report its holes
        return os.fstat(descriptor).st_size
    finally:
        os.lseek(descriptor, 0, os.SEEK_SET)


def read_records(*paths: Path, columns: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yield (location of the record for error messages, record) for each line or row of the files.
    If a Parquet file has any of `columns`, only these columns are read. Raises UserError if a file
    cannot be parsed."""
    table = partial(_read_table, columns=columns)
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv}
    for path in paths:
        yield from readers.get(suffix_of(path), table)(path)


def column_names(path: Path) -> list[str]:
    """Return the names of all columns in a Parquet file, or [] for any other file."""
    if suffix_of(path) != ".parquet":
        return []
    import pyarrow.parquet

    return list(pyarrow.parquet.read_schema(path).names)


def has_added_nulls(path: Path) -> bool:
    """Return whether a file is a Parquet or Arrow table. Such a table adds nulls to a nested record
    for members that occur only in other records."""
    return suffix_of(path) in (".parquet", ".arrow")


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(read_text(path, by_line=True), 1):
        if line.strip():
            where = f"{path} line {number}"
            try:
                yield where, parse_json(line.removesuffix("\n"))
            except json.JSONDecodeError as error:
                if line.endswith("\n") and not line[error.pos :].strip():
                    what = f"{where} contains only part of a JSON value"
                    fix = "write each record on one line, as jq --compact-output does"
                    if line.startswith("["):
                        fix = "if the file is one list, give it the suffix .json"
                    raise UserError(what, "each line must be a whole record", fix) from None
                what = f"{where} is not valid JSON at column {error.colno}"
                raise UserError(what, json_mistake(error)) from None
            except ValueError as error:
                raise UserError(f"{where} cannot be read", str(error)) from None


def _read_json(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (location, record) for each record in a JSON file. The file may contain a list of
    records, a single record, or JSON Lines."""
    head = next(read_text(path), "").lstrip()
    needed_bytes = _JSON_BYTES * path.stat().st_size
    if needed_bytes > (available_bytes := available_ram_bytes()):
        what = f"reading {path} needs about {needed_bytes / 1e9:.1f} GB of RAM"
        available = f"{available_bytes / 1e9:.1f} GB"
        why = f"a JSON file is read into memory as a whole, but only {available} is available"
        raise UserError(what, why, "convert it to .jsonl")
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
        raise UserError(f"{where} is not JSON", json_mistake(error)) from None
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
                fix = 'put text that contains a comma in quotes: "one, two"'
                raise UserError(f"{where} has more fields than the header", fix=fix)
            missing = [name for name, value in row.items() if value is None]
            if missing:
                what = f"{where} has fewer fields than the header"
                raise UserError(
                    what, f"the field {missing[0]!r} is missing", "add the missing fields"
                )
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
            if path.suffix == ".arrow" and file.read(6) == b"ARROW1":
                table = pyarrow.ipc.open_file(file)
                batches = map(table.get_batch, range(table.num_record_batches))
            elif path.suffix == ".arrow":  # a stream, as written by the datasets library
                file.seek(0)
                batches = iter(pyarrow.ipc.open_stream(file))
            else:
                table = pyarrow.parquet.ParquetFile(file)
                batch_rows = _choose_batch_rows(table, path)
                names = [name for name in table.schema_arrow.names if name in columns]
                batches = table.iter_batches(batch_rows, columns=names or None)
            size = 0
            max_address_space = _max_address_space()
            while (batch := _next_batch(batches, max_address_space)) is not None:
                names = batch.schema.names
                if len(names) > len(set(names)):
                    raise ValueError(f"the column {max(names, key=names.count)!r} appears twice")
                if path.suffix == ".arrow":  # wrong offsets could point outside the file's memory
                    batch.validate(full=True)
                if batch.nbytes > max_unpacked_bytes(path):
                    raise bomb_error(path)
                for first in range(0, batch.num_rows, _BATCH_ROWS):
                    for row in batch.slice(first, _BATCH_ROWS).to_pylist():
                        size += _num_characters(row)  # a value may be stored once for many rows
                        if size > max_unpacked_bytes(path):
                            raise bomb_error(path)
                        number += 1
                        yield f"{path} row {number}", row
    except UserError:
        raise
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        why = first_line(error)
        raise UserError(f"{path} cannot be read as {path.suffix[1:]}", why) from None


def _max_address_space() -> int:
    """Return the address-space limit in bytes that keeps this process within the available
    memory."""
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = [num_pages * resource.getpagesize() + available_ram_bytes()]
    limits += resource.getrlimit(resource.RLIMIT_AS)
    return min(limit for limit in limits if limit != resource.RLIM_INFINITY)


def _next_batch(batches: Iterator[Any], max_address_space: int) -> Any:
    """Return the next batch of rows, or None at the end of the table. While the batch is read, the
    process's address space is limited to `max_address_space` bytes. If the limit is too small,
    pyarrow raises MemoryError. Without a limit, the kernel might kill the process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (max_address_space, hard))
    try:
        return next(batches, None)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _num_characters(value: Any) -> int:
    """Return the total length of all strings in a record. Any other value counts as one
    character."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_num_characters, value.values()))
    return sum(map(_num_characters, value)) if isinstance(value, list) else 1


def _choose_batch_rows(table: Any, path: Path) -> int:
    """Return the number of rows to decode at a time, which is 1 if a row may be much larger than
    the file. Such a row is possible because a file may store a repeated value only once. Raises
    UserError if a column unpacks to more than `max_unpacked_bytes` allows."""
    metadata = table.metadata
    num_bytes = path.stat().st_size
    if metadata.num_rows > max(10**6, num_bytes):  # A repeated value may need no space at all.
        raise bomb_error(path)
    largest_column = 0
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            column = metadata.row_group(group).column(number)
            largest_column = max(largest_column, column.total_uncompressed_size)
            if largest_column > max_unpacked_bytes(path):
                raise bomb_error(path)
    return 1 if largest_column > 4 * num_bytes + _UNPACKED_BYTES // _BATCH_ROWS else _BATCH_ROWS


def max_unpacked_bytes(path: Path) -> int:
    """Return the maximum number of bytes that a file may unpack to. The limit is far above the size
    of ordinary text, which is at most ten times the size of the compressed file."""
    return max(_UNPACKED_BYTES, _UNPACKED_RATIO * path.stat().st_size)


def bomb_error(path: Path) -> UserError:
    """Return the error for a file that unpacks to more than `max_unpacked_bytes` allows."""
    why = f"it unpacks to more than {_UNPACKED_RATIO} times its size on disk"
    fix = "convert it to .jsonl"
    return UserError(f"dataset file {path} cannot be read", why, fix)


def open_file(path: Path) -> IO[bytes]:
    """Open a file for reading, and decompress it if necessary. Raises UserError if the file is not
    a regular file or cannot be opened."""
    try:
        # Files in /proc and /sys count as regular, but reading them may block or never end.
        if not path.is_file() or path.resolve().parts[1:2] in (("proc",), ("sys",)):
            what = f"dataset file {path} is not a regular file"
            raise UserError(what, fix="copy its content to a regular file")
        if path.suffix in COMPRESSIONS:
            import pyarrow

            return pyarrow.input_stream(str(path), compression=COMPRESSIONS[path.suffix])
        return path.open("rb")
    except OSError as error:
        raise UserError(f"dataset file {path} cannot be read", error.strerror or "") from None


def _not_utf8(path: Path, why: str, encoding: str, name: str) -> UserError:
    copy = path.with_suffix(f".utf8{path.suffix}")
    command = shlex.join(["iconv", "-f", encoding, "-t", "UTF-8", str(path), "-o", str(copy)])
    fix = f"convert it to UTF-8. If it is {name}, run: {command}"
    return UserError(f"dataset file {path} cannot be read", why, fix)
