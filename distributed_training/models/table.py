"""Find published models in table.json by any spelling of their names.

An entry has other names with the same shape (`also`), each with its source as [repository, file,
commit], the sources of its own values, and either the model's `size`, measured with transformers,
or its `config`, if models/hub/dense.py computes the size."""

import functools
import json
import math
import re
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parent / "table.json"
_WORD = re.compile(r"[ae]\d+(?:\.\d+)?b|\d+(?:\.\d+)*[bkm]?|[a-z]+")  # such as a3b, 2.5, 8b, qwen
_SIZE = re.compile(r"([1-9]\d*(?:\.\d+)?|0\.\d*[1-9])b")  # billions of parameters
_VARIANTS = {"base", "chat", "instruct", "it", "pt", "reasoning", "think", "thinking"}
_OFTEN_OMITTED = {"base", "hf", "it", "meta", "pt"}


@functools.cache
def read_table() -> dict[str, dict[str, Any]]:
    """Return the entries by name. Other names of an entry precede its first name."""
    entries: dict[str, dict[str, Any]] = {}
    for name, entry in json.loads(TABLE.read_text()).items():
        entries |= dict.fromkeys([*entry["also"], name], entry)
    return entries


def match_names(text: str) -> tuple[list[str], bool]:
    """Return the names that differ least from `text`, without its owner, and whether they contain
    all its words. Names of the same family come first, then those of the nearest size, and of these
    those with the fewest other words."""
    label = text.rpartition("/")[2].lower().replace("+", " plus")
    words = set(_WORD.findall(label))
    size = _SIZE.search(label)
    ranks = {}
    for name in read_table():
        own_label = name.rpartition("/")[2].lower()
        own_words = set(_WORD.findall(own_label))
        missing = words - own_words
        own_size = _SIZE.search(own_label)
        distance = math.inf if size and not own_size else 0.0
        if size and own_size:
            distance = abs(math.log(float(size[1]) / float(own_size[1])))
        num_others = len(set(filter(str.isalpha, own_words - words)) - _OFTEN_OMITTED)
        num_families = sum(map(str.isalpha, missing - _VARIANTS))
        ranks[name] = num_families, distance, len(missing), num_others
        if re.sub(r"\W|_", "", own_label) == re.sub(r"\W|_", "", label):
            ranks[name] = 0, 0, 0, -1
    best = min(ranks.values())
    _, _, num_missing, _ = best
    names = [name for name, rank in ranks.items() if rank == best]
    return (names, num_missing == 0) if num_missing < len(words) else ([], False)
