"""Resolve paths and parse JSON that users provide. Errors tell users what to fix. This module
does not import torch."""

import contextlib
import errno
import json
import os
import shutil
import stat
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic import BaseModel, ValidationError

from distributed_training.settings.errors import UserError

ROOT = Path(__file__).resolve().parents[2]  # root of the checkout
_ERROR_TEXTS = {
    "model_type": "is not a JSON object", "dict_type": "is not a JSON object",
    "extra_forbidden": "is not a known key", "missing": "is missing",
}  # fmt: skip
_CHUNK_BYTES = 16 * 2**20
_FULL_CRC_BYTES = 10**9
_NUM_CRC_BLOCKS = 1024
_CRC_BLOCK_BYTES = 4096
# Size limit for JSON files. A file of this size takes one to two seconds to parse.
_MAX_JSON_BYTES = 64_000_000
# Beginning of a message from Python's JSON parser -> this suite's message for the same mistake
_JSON_ERROR_TEXTS = {
    "Unexpected UTF-8 BOM": "it begins with a byte-order mark (BOM), which JSON does not allow",
    "Expecting value": "a value is missing, or is not JSON",
    "Expecting property name": "a key must be in double quotes",
    "Illegal trailing comma": "a comma before the closing bracket is not allowed",
    "Expecting ':'": "a colon is missing after a key",
    "Expecting ','": "a comma or a closing bracket is missing",
    "Extra data": "text follows the end of the JSON value",
    "Unterminated string": "the string that begins here has no closing quote",
    "Invalid control character": "a string contains a control character, such as a line break",
    "Invalid \\": "a string contains an invalid escape sequence",
}
Model = TypeVar("Model", bound=BaseModel)


def expand_home(key: str, text: str) -> str:
    """Expand `~` in `text`, which may be a path. Raises UserError if the path cannot be looked up
    because the user is unknown, the name is too long or a folder is not accessible."""
    try:
        path = Path(text).expanduser()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.stat(path / ("x" * 100))  # stands for any file in the folder
    except (OSError, RuntimeError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{key}={shown(text)} cannot be used as a path", why) from None
    # A Path would turn "./a" into "a", which could be a name on the Hub.
    return os.path.expanduser(text)


def relative_path(path: str | Path) -> str:
    """Return `path` relative to the current folder. If the current folder has been removed, return
    the absolute path."""
    try:
        return os.path.relpath(path)
    except FileNotFoundError:
        return str(path)


def resolve_user_path(text: str | Path) -> Path:
    """Return the path to a file or folder that the user names. A relative path refers to the
    current folder, or to the checkout if the path exists only there."""
    path = Path(text).expanduser()
    in_checkout = ROOT / path
    return in_checkout if in_checkout.exists() and not path.exists() else path


def obstacle_to_writing(folder: Path, *files: str) -> str:
    """Return the reason why `folder` or its `files` cannot be written. Return "" if they can be
    written. The check creates and removes a file in `folder`, or in the nearest existing parent,
    and opens each existing file in `files`."""
    tested_path = folder = folder.absolute()
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.stat(folder)
        tested_path = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        with tempfile.NamedTemporaryFile(prefix=".probe-", dir=tested_path) as probe:
            probe.write(bytes(4096))  # even on a full disk, an empty file can be created
        for tested_path in (folder / name for name in files):
            if os.path.lexists(tested_path):
                # Without O_NONBLOCK, opening a pipe that has no reader would block.
                os.close(os.open(tested_path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        return f"{tested_path} cannot be written: {error.strerror or error}"
    return ""


def require_writable(folder: Path, fix: str, *files: str) -> None:
    """Raise UserError if `folder` or its `files` cannot be written. Commands call this function
    before long-running work so that no results are lost."""
    if obstacle := obstacle_to_writing(folder, *files):
        raise UserError(obstacle, fix=fix)


def publish(unpublished: Path, final: Path) -> None:
    """Sync the file or folder `unpublished` to disk and rename it to `final`. An existing `final`
    is replaced."""
    for path in (*unpublished.rglob("*"), unpublished):
        _sync(path)
    if final.is_dir():
        shutil.rmtree(final)
    os.replace(unpublished, final)
    _sync(final.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading in binary mode. Raises OSError for a pipe or device, which
    could block or never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(descriptor, "rb")


def read_small(path: Path, max_bytes: int = _MAX_JSON_BYTES) -> bytes:
    """Read a settings file or a shell's process substitution, `<(...)`. Raises OSError for any
    other pipe, for a device, and for data larger than `max_bytes`."""
    with open(path, "rb") if path.parent == Path("/dev/fd") else open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {max_bytes // 10**6} MB", str(path))
    return data


def parse_json(text: str, *, unique: bool = False) -> Any:
    """Parse JSON. Raises ValueError for invalid syntax, excessively deep nesting or an unpaired
    surrogate. If `unique` is True, a duplicate key is also an error."""
    try:
        value = json.loads(text, object_pairs_hook=_reject_duplicate_keys if unique else None)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeEncodeError as error:
        raise ValueError(
            f"it contains an unpaired surrogate, {error.object[error.start]!a}"
        ) from None
    return value


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        duplicate = next(key for key in values if keys.count(key) > 1)
        raise ValueError(f"the key {shown(duplicate)} appears twice")
    return values


def load_json(
    path: Path, what: str, *, unique: bool = False, max_bytes: int = _MAX_JSON_BYTES
) -> Any:
    """Parse a JSON file. Raises UserError if the file cannot be read, if it is larger than
    `max_bytes` or if the JSON is invalid. A syntax error is reported with its line. `what`
    describes the file in the message. If `unique` is True, a duplicate key is also an error."""
    try:
        return parse_json(read_small(path, max_bytes).decode(), unique=unique)
    except FileNotFoundError:
        names = sorted(file.name for file in path.parent.glob("*.json"))
        missing = f"{what} {path} does not exist"
        fix = f"the folder contains {', '.join(names) or 'no JSON file'}"
        raise UserError(missing, fix=fix, typed=path.name, known=names) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        if isinstance(error, json.JSONDecodeError):
            why = _describe_json_error(error)
        elif isinstance(error, UnicodeDecodeError):
            why = f"byte {error.start + 1} is 0x{error.object[error.start]:02x}, which is not UTF-8"
        raise UserError(f"{what} {path} cannot be read as JSON", why) from None


def _describe_json_error(error: json.JSONDecodeError) -> str:
    """Describe a syntax error and its position. Comments and trailing commas, which other formats
    allow, are reported with their own messages."""
    remaining = error.doc[error.pos :].lstrip()
    line = error.doc.count("\n", 0, len(error.doc) - len(remaining)) + 1
    preceding = error.doc[: error.pos].rstrip()
    if remaining.startswith(("//", "#", "/*")):
        comment = shown(remaining.splitlines()[0])
        return f"line {line} has a comment, which JSON does not allow: {comment}"
    if remaining.startswith(("}", "]")) and preceding.endswith(","):
        return f"line {line} has a comma before {remaining[0]}, which JSON does not allow"
    return f"{json_mistake(error)} at line {error.lineno}, column {error.colno}"


def json_mistake(error: json.JSONDecodeError) -> str:
    """Return this module's description of an error from Python's JSON parser. If there is no
    description, return the parser's message."""
    mistakes = (text for start, text in _JSON_ERROR_TEXTS.items() if error.msg.startswith(start))
    return next(mistakes, error.msg)


def crc32(file: Path, checksum: int = 0) -> int:
    """Return the CRC-32 of a file. `checksum` is the CRC-32 of the data that precedes the file."""
    with open(file, "rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def fingerprint_file(file: Path) -> str:
    """Return a file's size and CRC-32 as a string. Return "" if the file cannot be read.

    Reading a file larger than 1 GB takes a long time, so only 1,024 evenly spaced blocks of 4 KiB
    are read. A contiguous change of at least 1/1,000 of the file is detected. A smaller change may
    be missed."""
    try:
        with open_regular(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size <= _FULL_CRC_BYTES:
                return f"{size}-{crc32(file):08x}"
            checksum = 0
            for block in range(_NUM_CRC_BLOCKS):
                stream.seek((size - _CRC_BLOCK_BYTES) * block // (_NUM_CRC_BLOCKS - 1))
                checksum = zlib.crc32(stream.read(_CRC_BLOCK_BYTES), checksum)
    except OSError:  # the code that reads the contents reports the error
        return ""
    return f"{size}-{checksum:08x}"


def crc32_of(values: Mapping[str, Any]) -> int:
    """Return the CRC-32 of `values` serialized as JSON with sorted keys."""
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


def parse_as(model: type[Model], document: Any, source: str, fix: str) -> Model:
    """Return a JSON document as a validated instance of `model`. Raises UserError with a message
    that begins with `source` and, if possible, names the invalid key."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
    # Validators that compute with a value may raise these errors.
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise UserError(f"{source}: a value has the wrong type", str(error), fix) from None
    name = ".".join(map(str, first["loc"])) or "it"
    if first["type"] in _ERROR_TEXTS:
        raise UserError(f"{source}: {name} {_ERROR_TEXTS[first['type']]}", fix=fix)
    rule = first["msg"].replace("Input", "it", 1)
    raise UserError(f"{source}: {name}={shown(first['input'])} is not accepted", rule, fix)


def shown(value: object) -> str:
    """Return `repr(value)` for an error message, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:200]} ... ({len(text)} characters)"


def one_of(words: Sequence[str]) -> str:
    """Return a string such as "a, b or c"."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def plural(count: int, noun: str) -> str:
    """Return a string such as "1 process" or "2 processes"."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}es" if noun.endswith(("s", "ch")) else f"{count} {noun}s"
