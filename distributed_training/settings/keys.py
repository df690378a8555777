"""Define the class for CONFIG keys, and the argument parser for all commands. Validation, parsing,
error messages and help are derived from the keys. Pydantic validates values and generates the JSON
schemas that list the accepted values. This module does not import torch."""

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from distributed_training.settings.errors import UserError
from distributed_training.settings.files import did_you_mean, load_json, shown

Number = TypeVar("Number", int, float)
_VALUES_BY_WORD: dict[str, dict[str, Any]] = {
    "boolean": {"true": True, "false": False},
    "null": {"none": None},
}


class KeyModel(BaseModel):
    """Base class for classes whose fields are CONFIG keys."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        defer_build=True,
    )


class Options(KeyModel):
    """Base class for the OPTIONS of a strategy's engine, whose fields are added to CONFIG's keys. A
    subclass may override the methods that check the options and declare the engine's costs."""

    def steps_between_exchanges(self) -> int | None:
        """If the engine exchanges parameters instead of gradients, return the number of steps
        between two exchanges. Each exchange contains one fp32 value per model parameter. Return
        None if gradients are exchanged in every step, during the backward pass."""
        return None

    def check(self, precision: str, hidden_size: int) -> None:
        """Raise UserError if these options do not work with the compute dtype `precision` or with a
        model of this hidden size."""

    def idle(self) -> dict[str, str]:
        """Return the options that have no effect because of the values of other options, each with
        the reason."""
        return {}

    def bytes_per_parameter(self, num_replicas: int) -> float:
        """Return the number of bytes per parameter that the engine stores in addition to weights,
        gradients and Adam moments."""
        return 0

    def sent_bytes(
        self, num_values: int, matrices: Sequence[tuple[int, int]], num_replicas: int
    ) -> dict[str, int]:
        """Return the size of one exchange in bytes, keyed by collective operation. The exchange
        contains `num_values` values. `matrices` contains the (rows, columns) of each gradient that
        is a matrix."""
        return {"all_reduce": 4 * num_values}


def config_key(
    default: Any, *, work: bool, group: str = "Options of a strategy's own engine"
) -> Any:
    """Declare a model field as a key. Its help text is the string below the field in the source
    code. `work` is True if two runs must have the same value to be
    comparable."""
    schema: Any = {"work": work, "group": group}
    return Field(default=default, json_schema_extra=schema)


class Key(BaseModel):
    """CONFIG key and its description for users."""

    name: str
    default: Any
    help: str  # help text on one line
    group: str  # heading in --help and in the guide
    work: bool  # whether comparable runs must have the same value
    schemas: list[dict[str, Any]]  # JSON schemas; a value must match one of them

    @property
    def choices(self) -> list[str]:
        return [
            value
            for schema in self.schemas
            for value in schema.get("enum", [schema.get("const")])
            if isinstance(value, str)
        ]

    def parse(self, text: str) -> Any:
        """Convert `text` from the command line to a choice, a Boolean, None or a number if the key
        accepts such a value. Otherwise, return `text` itself."""
        word = text.strip().lower()
        types = {schema.get("type", "") for schema in self.schemas}
        values: dict[str, Any] = {choice.lower(): choice for choice in self.choices}
        for type_name in types.intersection(_VALUES_BY_WORD):
            values |= _VALUES_BY_WORD[type_name]
        if word in values:
            return values[word]
        if types & {"integer", "number"}:
            for convert in (int, float):
                with contextlib.suppress(ValueError):
                    return convert(word)
        return text


@functools.cache
def read_keys(model: type[BaseModel]) -> dict[str, Key]:
    """Return the keys that the fields of a pydantic model declare, in the order of the fields."""
    keys = {}
    for name, schema in model.model_json_schema().get("properties", {}).items():
        if "work" in schema:
            help = " ".join(schema.get("description", "").split())
            keys[name] = Key(name=name, help=help, schemas=schema.get("anyOf", [schema]), **schema)
    return keys


def check_names(names: Iterable[Any], keys: Mapping[str, Key], source: str) -> None:
    """Raise UserError if one of the `names` is not the name of a key."""
    for name in names:
        if name not in keys:
            fix = advise_on_name(str(name), keys) or f"the keys are {', '.join(keys)}"
            raise UserError(f"{source} has the unknown key {shown(name)}", fix=fix)


def advise_on_name(word: str, names: Iterable[str]) -> str:
    """Return advice on an unknown name: the corresponding option if it is an option of
    transformers' Trainer, accelerate or a launcher, otherwise the most similar of `names`. Return
    "" if no name is similar."""
    table = load_json(Path(__file__).with_name("foreign.json"), "the table of foreign options")
    return str(table.get(word.lower().replace("-", "_")) or did_you_mean(word, names))


class Parser(argparse.ArgumentParser):
    """Argument parser that accepts no abbreviated options and raises UserError for invalid
    arguments."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.keys: Set[str] = set()  # options that are CONFIG keys
        # The deepspeed launcher passes this option.
        self.add_argument("--local_rank", help=argparse.SUPPRESS)

    def error(self, message: str) -> NoReturn:
        raise UserError(message, fix="see --help")


def at_least(minimum: Number) -> Callable[[str], Number]:
    """Return an argparse `type` function. The function accepts numbers of at least `minimum` and
    returns them with the type of `minimum`."""

    def number(text: str) -> Number:
        with contextlib.suppress(ValueError):
            value = type(minimum)(text)
            if value >= minimum:
                return value
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a number >= {minimum}")

    return number
