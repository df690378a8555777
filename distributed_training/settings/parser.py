"""How every command reads its options: none abbreviated, a mistake in one line."""

import argparse
import contextlib
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from distributed_training.settings.errors import UserError
from distributed_training.settings.files import shown

Number = TypeVar("Number", int, float)


class Parser(argparse.ArgumentParser):
    """argparse's; raises UserError for what it cannot read."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(message, fix="see --help")


def at_least(least: Number) -> Callable[[str], Number]:
    """An option's `type`: a number like `least`, the smallest that is taken."""

    def number(text: str) -> Number:
        with contextlib.suppress(ValueError):
            value = type(least)(text)
            if value >= least:
                return value
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a number of at least {least}")

    return number
