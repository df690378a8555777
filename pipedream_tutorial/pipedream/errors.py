"""The error that a user can mend: what is wrong, why, and what to type instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Shown as one line, exit code 2, no traceback."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what}; {fix}")


def nearest(word: str, known: Iterable[str]) -> str:
    """'did you mean ...?' or the whole list, for a word that is not in `known`."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(known)}"
