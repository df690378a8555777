"""Read a folder's config.json as transformers does. If the result is cached, neither transformers
nor torch is imported."""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from distributed_training.settings.cache import cache_folder
from distributed_training.settings.errors import UserError, describe
from distributed_training.settings.files import load_model_json, replace_file

CONFIG_FILE = "config.json"
MAX_LISTED = 100_000
_LISTED = re.compile(r"layers?$|^num_labels$")  # keys of counts for which transformers makes lists
Count = Annotated[int, Field(ge=1)]
GENERATION_CONFIG = "generation_config.json"
version = functools.cache(importlib.metadata.version)  # parses a file for milliseconds


class FamilyConfig(BaseModel, strict=True):
    """Key of a config.json that no family supports."""

    quantization_config: None = Field(None, exclude=True)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the values of a folder's config.json, completed with transformers' defaults.

    Keys have the names that the installed version of transformers uses. For example, older names of
    `rope_parameters` are replaced. Code in the folder is never run. Raises UserError if
    transformers cannot read the file."""
    document = load_model_json(folder / CONFIG_FILE)
    _check_counts(folder / CONFIG_FILE, document)
    if find_spec("transformers") is None:
        return complete_config(document)
    text = json.dumps(document, sort_keys=True)

    def read() -> str:
        try:
            import transformers

            transformers.logging.set_verbosity_error()
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
            # A model completes its rotary parameters again when it is built. Only then do keys next
            # to `rope_scaling` take effect.
            if getattr(config, "rope_parameters", None):
                config.standardize_rope_params()
            values = config.to_dict()
            for key in ("_name_or_path", "auto_map"):  # the folder, and its code
                values.pop(key, None)
            return json.dumps(values)
        except Exception as error:  # transformers may raise any exception for a wrong value
            why = describe(error)
            if document.get("auto_map"):  # transformers would advise running that code.
                why = "its auto_map refers to custom code, which is never run"
            raise UserError(f"transformers cannot read {folder / CONFIG_FILE}", why) from None

    complete = cached_json(f"4 {version('transformers')} {text}", read)
    # Write Infinity as transformers does, because JSON has no such number.
    return json.loads(complete, parse_constant=lambda name: {"__float__": name})  # type: ignore[no-any-return]


def _check_counts(file: Path, document: dict[str, Any]) -> None:
    """Raise UserError if a model has so many layers or labels that a list of them fills the RAM."""
    for key, value in document.items():
        if isinstance(value, dict):
            _check_counts(file, value)
        elif _LISTED.search(key) and isinstance(value, int) and value > MAX_LISTED:
            why = f"{key} is {value}, and no model has more than {MAX_LISTED}"
            raise UserError(f"{file} cannot be used", why, "restore the file")


def complete_config(document: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a config.json, completed as transformers does for GPT-2, Llama, Mistral,
    Qwen2 and Qwen3, so that planning does not need transformers."""
    scaling = document.get("rope_scaling") or {}
    rope_type = scaling.get("type", "default")
    rope = {"rope_type": rope_type, "rope_theta": document.get("rope_theta", 10000.0), **scaling}
    heads = document.get("num_attention_heads")
    defaults: dict[str, Any] = {"num_key_value_heads": heads, "rope_parameters": rope}
    if document.get("model_type") == "mistral":
        defaults["sliding_window"] = 4096
    if document.get("model_type") == "qwen3":
        defaults["head_dim"] = 128
    return {**defaults, **document}


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Return the values of a folder's generation_config.json. Without such a file, transformers
    stops at `eos_token_id` in config.json, so return only this key. Raises UserError if the file is
    invalid."""
    file = folder / GENERATION_CONFIG
    if file.is_file():
        return load_model_json(file)
    return {"eos_token_id": load_model_json(folder / CONFIG_FILE).get("eos_token_id")}


def cached_json(key: str, compute: Callable[[], str]) -> str:
    """Return a value as JSON, from the user's cache or from `compute`.

    The value must depend only on `key`. Importing transformers takes seconds, so the value is
    cached for other processes and later runs. If the cache is not writable, the value is not
    stored."""
    cache_file = cache_folder() / "configs" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
    with contextlib.suppress(OSError):
        return cache_file.read_text()
    value = compute()
    with contextlib.suppress(OSError):
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(cache_file, value.encode())
    return value
