"""Read a script's CONFIG and apply `--set key=value` to it. This module does not import torch.

A script defines CONFIG, a plain dict with a comment after each key that explains the key. It also
defines one Rule per key for the accepted values. The rules check both values from the command line
and values that were edited in the file.
"""

import argparse
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn

import pipedream_simple as simple

from pipedream.errors import UserError, nearest

FOLDER = Path(__file__).resolve().parent.parent
"""Folder of the tutorial."""

# The limits on length exclude exponents and digit strings that would make computations slow.
_NUMBER = re.compile(
    r"[+-]?((\d{1,20}(\.\d{0,20})?|\.\d{1,20})(e[+-]?\d{1,2})?|\d{1,15}/0{,9}[1-9]\d{,9})",
    re.ASCII | re.I,
)
_BOOLEANS = dict.fromkeys(("true", "yes", "on", "1"), True)
_BOOLEANS |= dict.fromkeys(("false", "no", "off", "0"), False)
_TYPE_TEXTS = {int: "a whole number", bool: "True or False", str: "text"}  # otherwise "a number"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Type, range and choices of the values that a CONFIG key accepts."""

    kind: type  # int, float, bool, str, or Fraction for a duration, which keeps 1/3 exact
    is_list: bool = False  # a list of such values: [1, 2] in CONFIG, 1,2 on the command line
    nullable: bool = False  # whether None is accepted (none on the command line)
    choices: tuple[str, ...] = ()
    file_suffix: str = ""  # if set, also accept paths with this suffix and paths of existing files
    low: float | Fraction = -math.inf
    high: float = math.inf  # also set `low` if you set `high`; describe() shows both

    def check(self, key: str, value: object) -> Any:
        """Check a value from the command line or CONFIG, and convert it to `kind`. Raises UserError
        if the value is not accepted."""
        if self.nullable and str(value).strip().lower() == "none":
            return None
        items: object = value if self.is_list else [value]
        if self.is_list and isinstance(value, str):
            items = value.strip().removeprefix("[").removesuffix("]").split(",")
        if not isinstance(items, (list, tuple)) or not items:
            raise self._error(key, value)
        values = [self._parse_one(item) for item in items]
        if None in values:
            raise self._error(key, items[values.index(None)])
        return values if self.is_list else values[0]

    def _parse_one(self, value: object) -> Any:
        """Convert one value to `kind`. Return None if the value is not accepted."""
        text = str(value).strip()
        if self.kind is bool:
            return _BOOLEANS.get(text.lower())
        if self.kind is str:
            # Surrogates stand for command-line bytes that cannot be decoded. They cannot be
            # printed.
            if not isinstance(value, str) or not text or not text.isprintable():
                return None
            file = self.file_suffix and (
                text.lower().endswith(self.file_suffix) or Path(text).is_file()
            )
            choices_by_lowercase = {name.lower(): name for name in self.choices}
            return choices_by_lowercase.get(
                text.lower(), text if file or not choices_by_lowercase else None
            )
        fraction = Fraction(text) if _NUMBER.fullmatch(text) else None
        if fraction is None or (self.kind is int and fraction.denominator > 1):
            return None
        number = self.kind(fraction)
        return number if self.low <= number <= self.high else None

    def describe(self) -> str:
        """Return a description of the accepted values, such as "a whole number from 1 to 64"."""
        text = _TYPE_TEXTS.get(self.kind, "a number")
        if self.choices:
            text = "one of " + ", ".join(self.choices)
        if self.file_suffix:
            text += f", or a file *{self.file_suffix}"
        if math.isfinite(self.low):
            text += f" from {float(self.low):.10g} to {self.high:.10g}"
        if self.is_list:
            text = f"a comma-separated list, each item {text}"
        elif self.kind is Fraction:
            text += ", such as 2, 0.5 or 1/3"
        return f"{text}, or None" if self.nullable else text

    def _error(self, key: str, value: object) -> UserError:
        hint = nearest(value, self.choices) if self.choices and isinstance(value, str) else ""
        if not hint.startswith("did"):
            hint = f"give {self.describe()}"
        return UserError(f"{key}={_format_value(value)} is not accepted", hint)


MIN_DURATION = Fraction(1, 10**9)  # lower limit of durations, which may be short but not 0

# Keys that more than one script has.
SHARED_RULES: dict[str, Rule] = {
    "num_stages": Rule(kind=int, low=1, high=64),
    "num_microbatches": Rule(kind=int, low=1, high=512),
    "forward": Rule(kind=Fraction, low=MIN_DURATION, high=10**6),
    "input_gradient": Rule(kind=Fraction, low=MIN_DURATION, high=10**6),
    "weight_gradient": Rule(kind=Fraction, low=0, high=10**6),
    "communication": Rule(kind=Fraction, low=0, high=10**6),
    "overlap_saving": Rule(kind=Fraction, low=0, high=1),
    "stage_scale": Rule(kind=Fraction, is_list=True, nullable=True, low=MIN_DURATION, high=1000),
    "chunks": Rule(kind=int, low=1, high=16),
}

# Hints for keys of earlier versions
KEY_HINTS = {"backward": "set input_gradient or weight_gradient, the halves of the backward pass"}


def parse_arguments(
    config: Mapping[str, Any],
    rules: Mapping[str, Rule],
    description: str,
    *,
    script: str,
    arguments: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Apply the command-line changes to CONFIG, check every value, and return the result.

    `--set key=value` accepts several changes and may be repeated. `--key value` is equivalent, and
    the last value wins. --help prints all keys and exits with 0. `arguments` defaults to the
    command line. Raises UserError if a key is unknown, or if its rule does not accept the value.
    """
    for key in sorted(config.keys() ^ rules.keys(), key=str):
        if key in config:
            raise UserError(
                f"CONFIG has the unknown key {_format_value(key)}", nearest(str(key), rules)
            )
        raise UserError(f"CONFIG has no key {key!r}", "write it back into the script's CONFIG")
    text = Path(simple.__file__).read_text() + Path(script).read_text()
    comments = dict(re.findall(r'(?m)^    "(\w+)": .*  # (.*)$', text))
    parser = _Parser(
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        prog=Path(sys.argv[0]).name.replace("__main__.py", "python -m pipedream"),
        usage="%(prog)s [options] [--set KEY=VALUE ... | --KEY VALUE] ...",
    )
    text = "change keys of CONFIG; may be repeated"
    parser.add_argument(
        "--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", help=text
    )
    keys = parser.add_argument_group("keys of CONFIG (--set key=value, or --key value)")
    for key, default in config.items():
        meaning = comments.get(key, "")  # empty for a value that was edited to span several lines
        text = f"{meaning} ({rules[key].describe()}; default {_format_value(default)})".replace(
            "%", "%%"
        )
        format_change = (key + "={}").format
        keys.add_argument(
            f"--{key}", action="append", dest="set", type=format_change, help=text, metavar=""
        )
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        name = unknown[0].partition("=")[0]
        known = [f"--{name}" for name in ["set", *config]]
        hint = KEY_HINTS.get(name.removeprefix("--")) or nearest(name, known)
        if not name.startswith("--"):
            hint = "write --set key=value, without spaces"
        raise UserError(f"unknown argument {_format_value(unknown[0])}", hint)
    merged = dict(config)
    for change in parsed.set:
        key, equals, value = str(change).partition("=")  # argparse passes "--" as a list
        key = key.strip()
        if not equals:
            raise UserError(
                f"--set {_format_value(change)} has no equals sign", "write --set key=value"
            )
        if key not in config:
            hint = KEY_HINTS.get(key) or nearest(key, config)
            raise UserError(f"CONFIG has no key {_format_value(key)}", hint)
        merged[key] = value
    return {key: rules[key].check(key, value) for key, value in merged.items()}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message, "--help lists all options")


def _format_value(value: object) -> str:
    """Return a value as text, in the form in which a user would type it. The text is on one line,
    and is shortened if it is long."""
    text = str(value)
    if not text.strip() or not text.isprintable():
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
