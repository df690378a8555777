"""A folder's config.json as transformers reads it. No torch import where the cache has it."""

import contextlib
import functools
import hashlib
import json
import os
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from distributed_training.settings.cache import cache_folder
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import load_json, parse_json, shown

CONFIG_FILE = "config.json"
# The largest accepted values. transformers makes lists with an entry per layer and per label, and a
# model of the Hub is built to measure it: larger values would take hours or all memory.
_MOST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 4096),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "intermediate_size", "n_inner"), 2**24),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "vocab_size"), 2**24),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads", "head_dim"), 2**16),
    "num_labels": 10**6,
}


def read_config(folder: Path) -> dict[str, Any]:
    """Return the values of a folder's config.json with transformers' defaults, in its newest form:
    `rope_parameters` whatever the file calls them, for example. No code in the folder runs.
    Raises UserError if transformers refuses the file."""
    file = folder / CONFIG_FILE
    given = load_json(file, "model")
    if not isinstance(given, dict):
        raise UserError(f"{file} is not a JSON object", fix="copy the model's folder again")
    if not isinstance(kind := given.get("model_type"), str | None):
        what = f"{file}: model_type {shown(kind)} is not accepted"
        raise UserError(what, "it is the name of a model family, such as 'llama'")
    for key, most in _MOST.items():
        count = given.get(key)
        if isinstance(count, int) and count > most:
            raise UserError(
                f"{file}: {key}={count} is not accepted", f"at most {most:,} are supported"
            )
    return json.loads(_read_with_transformers(json.dumps(given, sort_keys=True), folder))


@functools.cache
def _read_with_transformers(text: str, folder: Path) -> str:
    """Return `read_config` as JSON. Importing transformers takes seconds, so the user's cache keeps
    the answer for every process and later run that reads a file with the same contents."""
    key = hashlib.sha256(f"{version('transformers')} {text}".encode()).hexdigest()
    cached = cache_folder() / "configs" / f"{key}.json"
    with contextlib.suppress(OSError, ValueError):
        kept = cached.read_text()
        if isinstance(parse_json(kept), dict):
            return kept
    try:
        import transformers

        transformers.logging.set_verbosity_error()
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        answer = json.dumps(config.to_dict())
    except Exception as error:  # transformers' own, and whatever a wrong value raises in it
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = f"{type(error).__name__}: {shown(' '.join(lines))[1:-1]}"
        raise UserError(f"transformers does not read {folder / CONFIG_FILE}", why) from None
    keep_answer(answer, cached)
    return answer


def keep_answer(answer: str, cached: Path) -> None:
    """Write a file of the user's cache, which may be read-only, all of it or nothing."""
    with contextlib.suppress(OSError):
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=cached.parent, delete=False) as new:
            new.write(answer)
        os.replace(new.name, cached)
