"""Merge CONFIG, a preset and the command line into one validated, immutable Request. This module
does not import torch."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from distributed_training.settings import files
from distributed_training.settings.config import AUTO, KEYS, PATHS, Request, validate
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import shown
from distributed_training.settings.keys import by_key, read_keys
from distributed_training.settings.strategies import (
    list_strategies,
    strategy_defaults,
    strategy_options,
)

PRESETS_DIR = files.ROOT / "configs" / "presets"


def build_config(
    config: Mapping[str, Any],
    *,
    preset: str | None = None,
    overrides: Iterable[str] = (),
    force: bool = False,
    strict: bool = False,
) -> Request:
    """Merge CONFIG, a preset and `key=value` strings; later sources take precedence. The strategy's
    defaults replace values of CONFIG that are None or "auto", and the strategy's engine may add
    keys. Raises UserError for a key, value or preset that cannot be used."""
    from_preset = {} if preset is None else load_preset(preset)
    texts = []
    for text in overrides:
        name, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--set {shown(text)} has no '='", fix="write --set key=value")
        texts.append((name.strip(), value))
    strategy = str({"strategy": AUTO, **config, **from_preset, **dict(texts)}["strategy"])
    own_model = strategy_options(strategy)
    own_keys = read_keys(own_model)
    keys = KEYS | own_keys
    for name in [name for name, _ in texts if name not in keys]:
        for other in list_strategies():
            if name in read_keys(strategy_options(other)):
                what = f"{name} is a key of strategy {other}, but the strategy is {strategy}"
                raise UserError(what, fix=f"leave out {name}, or set strategy to {other}")
    configured = by_key(config.items(), keys, "CONFIG")
    in_preset = by_key(from_preset.items(), keys, str(preset))
    typed = by_key(texts, keys, "the command line")
    over = in_preset | {name: keys[name].parse(text) for name, text in typed.items()}
    source = f"strategy {strategy}'s defaults"
    decided = {}
    for name, value in by_key(strategy_defaults(strategy).items(), keys, source).items():
        if keys[name].work:
            why = "strategies would then train differently and could not be compared"
            raise UserError(f"{source} contain {name}", why, f"remove {name} from its config.json")
        if name not in over and configured.get(name) in (None, AUTO):
            decided[name] = value
    values = {**configured, **over, **decided}
    engine_values = {name: values.pop(name) for name in own_keys if name in values}
    values["engine_options"] = validate(own_model, engine_values, keys).model_dump()
    for name in PATHS.intersection(values):
        if isinstance(values[name], str):
            values[name] = files.expand_home(name, values[name])
    changed = {name: value for name, value in configured.items() if value != keys[name].default}
    set_by = dict.fromkeys(changed, "CONFIG")
    set_by |= dict.fromkeys(in_preset, "preset") | dict.fromkeys(typed, "command line")
    changed |= over
    set_by = {name: setter for name, setter in set_by.items() if changed[name] != AUTO}
    values["set_by"] = set_by | dict.fromkeys(decided, "strategy")
    values |= {"preset": preset, "force": force, "strict": strict}
    return validate(Request, values, KEYS)


def load_preset(name_or_path: str) -> dict[str, Any]:
    """Return the values of a preset. `name_or_path` is the name of a shipped preset or a path."""
    path = Path(files.expand_home("preset", name_or_path))
    if not path.exists() and not path.parent.name:  # a bare word names a shipped preset
        path = PRESETS_DIR / f"{path.stem}.json"
        if not path.exists():
            names = sorted(file.stem for file in PRESETS_DIR.glob("*.json"))
            why = f"the presets are {', '.join(names)}"
            what = f"preset {name_or_path} does not exist"
            raise UserError(what, why, typed=name_or_path, known=names)
    document = files.load_json(path, "preset", unique=True)
    if not isinstance(document, dict):
        raise UserError(
            f"preset {name_or_path} is not a JSON object", fix='write {"key": value, ...}'
        )
    return {name: value for name, value in document.items() if name != "_comment"}


def by_name(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with each alias replaced by the name of its key."""
    names = {alias: key.name for key in KEYS.values() for alias in key.aliases}
    return {names.get(name.strip(), name.strip()): value for name, value in values.items()}


def typed_values(overrides: Iterable[str]) -> dict[str, str]:
    """Map the main name of each key in the `key=value` strings to its value."""
    return by_name(dict(text.partition("=")[::2] for text in overrides))


def texts(values: Mapping[str, Any]) -> list[str]:
    """Return `values` as `key=value` strings for the command line."""
    return [f"{key}={value}" for key, value in values.items()]
