"""The error that a user can mend: what is wrong, why, and what to type instead."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator


class UserError(ValueError):
    """Shown as one line, exit code 2, no traceback."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what}; {fix}")


def nearest(word: str, known: Iterable[str]) -> str:
    """'did you mean ...?' or the whole list, for a word that is not in `known`."""
    known = list(known)
    lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), lower, n=1)
    return f"did you mean {lower[close[0]]!r}?" if close else f"choose from {', '.join(known)}"


_PACKAGES = ("torch", "numpy", "matplotlib", "PIL")


@contextlib.contextmanager
def packages_needed() -> Iterator[None]:
    """Around imports: what requirements.txt lists and this Python lacks is a UserError."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in _PACKAGES:
            raise
        raise UserError(
            f"{package} is not installed in this Python",
            "type python -m pip install -r requirements.txt in the tutorial's folder",
        ) from None
