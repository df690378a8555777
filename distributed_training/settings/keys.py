"""What one CONFIG key is, and what follows from it: checks, parsing, words for errors and help; and
how every command reads its other options. pydantic checks the values; what is said about them comes
from its JSON schema. No torch import."""

import argparse
import contextlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from distributed_training.settings.errors import UserError
from distributed_training.settings.files import load_json, nearest, shown

Number = TypeVar("Number", int, float)
_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True}
_BOOLEANS |= {"false": False, "no": False, "off": False, "0": False}
_WORDS: dict[str, dict[str, Any]] = {"boolean": _BOOLEANS, "null": {"none": None, "null": None}}
_KINDS = {
    "integer": "a whole number", "number": "a number", "boolean": "True or False",
    "string": "text", "null": "None",
}  # fmt: skip


class Options(BaseModel):
    """Base of a class whose fields are keys: RunConfig, or OPTIONS of a strategy's own engine."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False,
        use_attribute_docstrings=True,
    )  # fmt: skip

    def steps_between_exchanges(self) -> int | None:
        """Steps after which copies of the model exchange as many fp32 values as it has parameters,
        when nothing else runs; None: their gradients, in every step, beside the backward pass."""
        return None

    def bytes_a_parameter(self) -> int:
        """State that the engine keeps besides weights, gradients and AdamW's moments."""
        return 0


def key(
    default: Any,
    *,
    work: bool,
    help: str | None = None,
    group: str = "Options of a strategy's own engine",
    aliases: tuple[str, ...] = (),
) -> Any:
    """Declare such a field, its help in it or as a string below it; `work`: whether it must agree
    between two runs that are compared."""
    extra: Any = {"work": work, "group": group, "aliases": aliases}
    return Field(default=default, description=help, json_schema_extra=extra)


class Key(BaseModel):
    """One key as users meet it."""

    name: str
    default: Any
    help: str  # one line
    group: str  # heading in --help and in the guide
    work: bool  # whether it changes what is computed, under every strategy
    aliases: tuple[str, ...]  # names that other programs use for it
    forms: list[dict[str, Any]]  # JSON schemas of what is accepted; one of them must fit

    @property
    def choices(self) -> list[str]:
        values = [value for form in self.forms for value in form.get("enum", [form.get("const")])]
        return [value for value in values if isinstance(value, str)]

    def accepts(self) -> str:
        """What is accepted, in words."""
        said = []
        for form in self.forms:
            if "enum" in form:
                text = "one of " + ", ".join(map(str, form["enum"]))
            elif "const" in form:
                text = json.dumps(form["const"])
            else:
                text = _KINDS[form["type"]]
            if "minimum" in form:
                text += f" >= {form['minimum']:g}"
            if "exclusiveMinimum" in form:
                text += f" > {form['exclusiveMinimum']:g}"
            if form.get("maximum", 2**20) < 2**20:  # larger ones only guard against overflow
                text += f" and <= {form['maximum']:g}"
            said.append(text)
        return " or ".join(said)

    def parse(self, text: str) -> Any:
        """The value that command-line `text` stands for; text that fits nothing is returned."""
        word = text.strip().lower()
        kinds = {form.get("type", "") for form in self.forms}
        words: dict[str, Any] = {choice.lower(): choice for choice in self.choices}
        for kind in kinds.intersection(_WORDS):
            words |= _WORDS[kind]
        if word in words:
            return words[word]
        if kinds & {"integer", "number"}:
            for convert in (int, float):
                with contextlib.suppress(ValueError):
                    return convert(word)
        return text


def read_keys(model: type[BaseModel]) -> dict[str, Key]:
    """The keys that a model's fields declare, in their order."""
    keys = {}
    for name, schema in model.model_json_schema().get("properties", {}).items():
        if "work" in schema:
            help = " ".join(schema.get("description", "").split())
            keys[name] = Key(name=name, help=help, forms=schema.get("anyOf", [schema]), **schema)
    return keys


def by_key(pairs: Iterable[tuple[Any, Any]], keys: Mapping[str, Key], where: str) -> dict[str, Any]:
    """The last value under each key's own name; UserError for a name of no key, or two of one."""
    known = _all_names(keys.values())
    found: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, value in pairs:
        if name not in known:
            hint = nearest_key(str(name), keys.values())
            near = f"did you mean {hint!r}?" if hint else f"the keys are {', '.join(keys)}"
            fix = foreign_key(str(name)) or near
            raise UserError(f"{where} has the unknown key {shown(name)}", fix=fix)
        own = known[name]
        if names.setdefault(own, name) != name:
            raise UserError(f"{where} has {own} twice, as {names[own]} and {name}", fix="give one")
        found[own] = value
    return found


def foreign_key(name: str) -> str | None:
    """Return how to ask for an option of transformers' Trainer, accelerate or a launcher here; None
    for a name that none of them has."""
    table = load_json(Path(__file__).with_name("foreign.json"), "the table of foreign options")
    advice: str | None = table.get(name.lower().replace("-", "_"))
    return advice


def nearest_key(word: str, keys: Iterable[Key], others: Iterable[str] = ()) -> str | None:
    """The key (or one of `others`) of which a name is close to `word`; None for nothing close."""
    names = _all_names(keys) | {name: name for name in others}
    close = nearest(word, names, cutoff=0.7)  # a far-fetched hint sends people off
    return names[close] if close else None


def _all_names(keys: Iterable[Key]) -> dict[str, str]:
    return {name: key.name for key in keys for name in (key.name, *key.aliases)}


class Parser(argparse.ArgumentParser):
    """argparse's, but it takes no abbreviation and raises UserError for what it cannot read."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.add_argument("--local_rank", help=argparse.SUPPRESS)  # deepspeed passes it

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
