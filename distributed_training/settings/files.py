"""Resolve paths and parse JSON that users provide. Errors tell users what to fix. This module
does not import torch."""

import contextlib
import difflib
import os
import re
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from distributed_training.settings.errors import UserError

_PACKAGE = Path(__file__).resolve().parents[1]
IS_INSTALLED = (_PACKAGE / "strategies").is_dir()  # from a wheel, not a checkout
ROOT = _PACKAGE if IS_INSTALLED else _PACKAGE.parent  # folder of strategies/ and configs/
MARK = "written by distributed_training"  # at the beginning of files that a command may replace
_SIGNATURE = re.compile(rf"{MARK} (\d+)".encode())  # with a checksum of the file without it
_ERROR_TEXTS = {
    "model_type": "is not a JSON object",
    "dict_type": "is not a JSON object",
    "extra_forbidden": "is not a known key",
    "missing": "is missing",
}
_CHUNK_BYTES = 16 * 2**20
REPLACED = ".replaced-"  # beginning of the name of a folder that is being replaced
JsonObject = dict[str, Any]
Model = TypeVar("Model", bound=BaseModel)


def resolve_user_path(text: str | Path) -> Path:
    """Return the path to a file or folder that the user names. A relative path refers to the
    current folder, or to the checkout if the path exists only there."""
    path = Path(text).expanduser()
    in_checkout = ROOT / path
    return in_checkout if in_checkout.exists() and not path.exists() else path


def is_outside(file: Path, folder: Path) -> bool:
    """Return whether `file` is a link that leaves `folder`. In the Hub's cache, the files of a
    repository are links to the blobs beside its snapshots."""
    folder, target = folder.resolve(), file.resolve()
    blobs = [parent.with_name("blobs") for parent in folder.parents if parent.name == "snapshots"]
    return not any(target.is_relative_to(root) for root in (folder, *blobs))


def open_probe(path: Path) -> IO[bytes]:
    """Return a temporary file in `path` or, if it does not exist, in the nearest folder that does.
    Raises UserError if no file can be written there."""
    folder = path
    while not folder.exists():
        folder = folder.parent
    try:
        return tempfile.TemporaryFile(dir=folder)
    except OSError as error:
        why = f"{folder}: {error.strerror}"
        raise UserError(f"{path} cannot be written", why, "name another place") from None


def check_replaced(path: Path) -> None:
    """Raise UserError if the file `path` exists and is not as `write_own` wrote it, or if it cannot
    be written."""
    if not os.path.lexists(path):
        open_probe(path).close()
        return
    signature = _SIGNATURE.search(path.open("rb").read(4096)) if path.is_file() else None
    if signature is not None:
        content = path.read_bytes().replace(signature[0], MARK.encode(), 1)
        if zlib.crc32(content) == int(signature[1]):
            return
    what = f"{path} exists, and it is not exactly what this program wrote"
    raise UserError(what, fix="name another file or folder, or move this one")


def write_own(path: Path, text: str) -> None:
    """Write a file that `check_replaced` accepts until somebody changes it. `text` contains MARK,
    which gets a checksum."""
    content = text.encode(errors="surrogateescape")
    signature = f"{MARK} {zlib.crc32(content)}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.replace(MARK.encode(), signature.encode(), 1))


def publish(unpublished: Path, final: Path) -> None:
    """Sync the file or folder `unpublished` to disk and rename it to `final`. An existing `final`
    is replaced. A folder cannot be replaced in one step, so the old folder first gets another name,
    from which `restore_replaced` restores it if this process dies before the second step."""
    for path in (*unpublished.rglob("*"), unpublished):
        _sync(path)
    if final.is_dir():
        os.rename(final, final.with_name(REPLACED + final.name))
    os.replace(unpublished, final)
    _sync(final.parent)
    restore_replaced(final)


def restore_replaced(final: Path) -> None:
    """Restore the folder `final` if a process died while it replaced the folder. If `final` exists,
    delete its predecessor instead."""
    replaced = final.with_name(REPLACED + final.name)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
    elif replaced.exists():
        os.rename(replaced, final)


@contextlib.contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a new temporary folder. If the `with` block raises no error, rename this folder to
    `folder`, which is replaced if it exists."""
    restore_replaced(folder)
    unfinished = folder.with_name(f".writing-{folder.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)  # raises if a link has this name
    try:
        yield unfinished
        publish(unfinished, folder)
    except OSError as error:  # errors of a full disk do not name the file
        error.filename = error.filename or str(folder)
        raise


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that readers see either the complete old content or the complete new
    content."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{time.monotonic_ns()}")
    try:
        temporary.write_bytes(content)
        publish(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        error.filename = error.filename or str(path)
        raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.utime(descriptor)  # a sign of progress for whoever watches a slow disk
    finally:
        os.close(descriptor)


def load_json(path: Path, what: str) -> Any:
    """Parse a JSON file. Raises UserError if the file cannot be read, or if the JSON is invalid or
    nested more than 200 levels deep. `what` describes the file in the message."""
    require_regular(path, what)
    try:
        return from_json(path.read_text("utf-8-sig"))
    except FileNotFoundError:
        names = sorted(file.name for file in path.parent.glob("*.json"))
        advice = did_you_mean(path.name, names)
        advice = advice or f"the folder contains {', '.join(names) or 'no JSON file'}"
        raise UserError(f"{what} {path} does not exist", advice) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{what} {path} cannot be read as JSON", why) from None


def load_object(path: Path, what: str) -> JsonObject:
    """Parse a JSON file that must contain an object. Raises UserError as `load_json` does, and for
    any other value."""
    document = load_json(path, what)
    if not isinstance(document, dict):
        raise UserError(f"{what} {path} is not a JSON object", f"it is {shown(document)}")
    return document


def load_model_json(path: Path) -> JsonObject:
    """Parse a JSON file of a model's folder, as `load_object` does. Raises UserError if the file is
    a link to a file in another folder, because its values would be exported with the model."""
    if is_outside(path, path.parent):
        why = "it is a link to a file in another folder"
        raise UserError(f"model {path} cannot be read", why, "copy the file to its place")
    return load_object(path, "model")


def require_regular(path: Path, what: str) -> None:
    """Raise UserError if `path` is a pipe, a device or anything else that is not a regular file,
    because reading it could block or never end. `what` describes the file in the message."""
    if path.exists() and not path.is_file():
        fix = "copy its content to a regular file"
        raise UserError(f"{what} {path} is not a regular file", fix=fix)


def crc32(file: Path) -> int:
    """Return the CRC-32 of a file."""
    checksum = 0
    with open(file, "rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def parse_as(model: type[Model], document: Any, source: str = "", fix: str = "") -> Model:
    """Return a JSON document or CONFIG as a validated instance of `model`. Raises UserError with a
    message that begins with `source` and, if possible, names the invalid key."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        first, *others = error.errors()
    place = first["loc"]
    rules = [first["msg"].replace("Input", "it", 1)]
    for other in others:
        # A key that accepts several types has an error for each, which ends with the type.
        if other["input"] is first["input"] and other["loc"][:-1] == first["loc"][:-1] != ():
            place = first["loc"][:-1]
            rules.append(other["msg"].partition(" should ")[2])
    name = ".".join(map(str, place)) or "it"
    what = f"{source}: {name}" if source else name
    if first["type"] in _ERROR_TEXTS:
        raise UserError(f"{what} {_ERROR_TEXTS[first['type']]}", fix=fix)
    why = " or ".join(rules).replace("a valid boolean", "True or False")
    raise UserError(f"{what}={shown(first['input'])} is not accepted", why, fix)


def shown(value: object) -> str:
    """Return `repr(value)` for an error message, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:200]} ... ({len(text)} characters)"


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return "did you mean X?" for the most similar of `names`, or "" if none is similar."""
    by_lower = {name.lower(): name for name in names}
    # A name that differs more would mislead the user.
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.7)
    return f"did you mean {by_lower[close[0]]}?" if close else ""


def one_of(words: Sequence[str]) -> str:
    """Return a string such as "a, b or c"."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def plural(count: int, noun: str) -> str:
    """Return a string such as "1 process" or "2,000 processes"."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}es" if noun.endswith(("s", "ch")) else f"{count:,} {noun}s"
