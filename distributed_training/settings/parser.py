"""How every command reads its options: none abbreviated, a mistake in one line."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from distributed_training.settings.errors import UserError
from distributed_training.settings.files import shown


class Parser(argparse.ArgumentParser):
    """argparse's; raises UserError for what it cannot read."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(message, fix="see --help")


def not_negative(text: str) -> int:
    """A number of 0 or more, as an option's `type`."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a number, 0 or more")
    return int(text)
