"""Tokenizers of transformers, in the process of references (tests/reference.py)."""

import functools
import itertools
from pathlib import Path
from typing import Any

from tests.reference import call_reference

_NUMBERS = itertools.count()


@functools.lru_cache(1)
def _load(folder: Path, number: int) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def _use(which: tuple[Path, int], name: str, arguments: Any, options: Any) -> Any:
    result = getattr(_load(*which), name)(*arguments, **options)
    return dict(result) if hasattr(result, "input_ids") else result


def _read(which: tuple[Path, int], name: str) -> Any:
    return getattr(_load(*which), name)


class TheirTokenizer:
    """`AutoTokenizer.from_pretrained(folder)`, whose methods run in the other process."""

    def __init__(self, folder: Path) -> None:
        self.which = (folder, next(_NUMBERS))  # a folder may be written again

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return call_reference(_use, self.which, "__call__", arguments, options)

    def __len__(self) -> int:
        return call_reference(_use, self.which, "__len__", (), {})

    def apply_chat_template(self, *arguments: Any, **options: Any) -> Any:
        return call_reference(_use, self.which, "apply_chat_template", arguments, options)

    def read(self, name: str) -> Any:
        """Return an attribute."""
        return call_reference(_read, self.which, name)

    def use(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call another method."""
        return call_reference(_use, self.which, name, arguments, options)
