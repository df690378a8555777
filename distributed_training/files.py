"""Paths and JSON that users hand us, with errors that they can act on. No torch import."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from distributed_training.errors import UserError

MAX_NESTING = 100  # deeper JSON would exhaust the stack of whoever copies or prints it
_INSIDE = "x" * 100  # stands for any file below a path that is asked for


def user_path(key: str, text: str) -> Path:
    """The path that `key` names, `~` expanded; whether it exists is for the caller to ask.

    Raises UserError where asking would fail: no such user, a name that is too long, a folder on
    the way, or the last one, that may not be entered.
    """
    try:
        path = Path(text).expanduser()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.stat(path / _INSIDE)
    except (OSError, RuntimeError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"{key}={shown(text)} cannot be used as a path", why, "give another path"
        ) from None
    return path


def parse_json(text: str) -> Any:
    """Parse `text`; every refusal is a JSONDecodeError, what Python's parser gives up on too."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError("it is nested too deeply", text, 0) from None
    except ValueError:
        raise json.JSONDecodeError("a number has more digits than can be read", text, 0) from None


def load_json(path: Path, what: str) -> Any:
    """Parse a JSON file; raise UserError with line and column where it does not parse."""
    try:
        document = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        folder = path.parent if path.parent.is_dir() else Path(".")
        near = nearest(path.name, [file.name for file in folder.glob("*.json")])
        hint = f"did you mean {folder / near}?" if near else "check the path"
        raise UserError(f"{what} {path} does not exist", fix=hint) from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}: {error.msg}"
        raise UserError(f"{what} {path} is not valid JSON", where, "mend that line") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{what} {path} cannot be read", str(error)) from None
    if _nesting(document) > MAX_NESTING:
        raise UserError(f"{what} {path} is nested more than {MAX_NESTING} levels deep")
    return document


def _nesting(document: Any) -> int:
    level, depth = [document], 0
    while level:
        level, depth = [child for node in level for child in _children(node)], depth + 1
    return depth


def _children(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else []


def check_unicode(where: str, text: str) -> None:
    """Raise UserError when `text` holds half of a surrogate pair, which JSON's \\u can write."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise UserError(
            f"{where} holds {half!r}, half of a surrogate pair",
            "it stands for no character, so that it cannot be tokenised",
            "write the character itself, or both halves",
        ) from None


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word closest to `word`, or None when nothing is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return close[0] if close else None


def shown(value: object) -> str:
    """repr(value) for an error: cut where it is long, described where Python refuses to print it
    (an integer of thousands of digits, a list inside itself a thousand times).
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} too large to print"
    return text if len(text) <= 300 else f"{text[:200]} ... ({len(text)} characters)"
