"""Merge CONFIG, a preset and the command line into one validated, immutable Request. This module
does not import torch."""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from distributed_training.settings import files
from distributed_training.settings.config import AUTO, KEYS, Request
from distributed_training.settings.errors import UserError
from distributed_training.settings.keys import check_names, read_keys
from distributed_training.settings.strategies import strategy_options

PRESETS_DIR = files.ROOT / "configs" / "presets"
TEMPLATES_DIR = files.ROOT / "configs" / "chat_templates"


def build_config(
    config: Mapping[str, Any],
    *,
    preset: str | None = None,
    overrides: Mapping[str, Any] = MappingProxyType({}),
    force: bool = False,
    strict: bool = False,
) -> Request:
    """Merge CONFIG, a preset and `overrides`; later sources take precedence. The values of
    `overrides` are read as on the command line. The strategy's engine may add keys. Raises
    UserError for a key, value or preset that cannot be used."""
    preset_document = {} if preset is None else load_preset(preset)
    typed_texts = {name: str(value) for name, value in overrides.items()}
    strategy = str({"strategy": AUTO, **config, **preset_document, **typed_texts}["strategy"])
    options_class = strategy_options(strategy)
    engine_keys = read_keys(options_class)
    keys = KEYS | engine_keys
    check_names(config, keys, "CONFIG")
    check_names(preset_document, keys, str(preset))
    check_names(typed_texts, keys, "the command line")
    typed_values = {name: keys[name].parse(text) for name, text in typed_texts.items()}
    values = {**config, **preset_document, **typed_values}
    changed = [name for name, value in config.items() if value != keys[name].default]
    given = {*changed, *preset_document, *typed_texts}
    set_keys = {name for name in given if values[name] != AUTO}
    engine_values = {name: values.pop(name) for name in engine_keys if name in values}
    values["engine_options"] = files.parse_as(options_class, engine_values).model_dump()
    if isinstance(values.get("dataset"), list):
        names = map(str, values["dataset"])
        values["dataset"] = shlex.join(map(os.path.expanduser, names))
    values |= {
        "set_keys": set_keys,
        "typed": typed_texts,
        "preset": preset,
        "force": force,
        "strict": strict,
    }
    request = files.parse_as(Request, values)
    if request.chat_template is None:
        return request
    text = read_template(request.chat_template)
    return request.model_copy(update={"chat_template": text})


def load_preset(name_or_path: str) -> dict[str, Any]:
    """Return the values of a preset. `name_or_path` is the name of a shipped preset or a path."""
    path = Path(name_or_path).expanduser()
    if not path.exists() and not path.parent.name:  # a bare word names a shipped preset
        path = PRESETS_DIR / f"{path.stem}.json"
    document = files.load_object(path, "preset")
    return {name: value for name, value in document.items() if name != "_comment"}


def read_template(name_or_path: str) -> str:
    """Return the text of a shipped chat template or of a file."""
    shipped = TEMPLATES_DIR / f"{name_or_path}.jinja"
    path = shipped if shipped.is_file() else files.resolve_user_path(name_or_path)
    if not path.is_file():
        names = sorted(file.stem for file in TEMPLATES_DIR.iterdir())
        fix = f"name a Jinja file, {files.one_of(names)}"
        raise UserError(f"chat_template={name_or_path!r} is not a file", fix=fix)
    return path.read_text(encoding="utf-8")
