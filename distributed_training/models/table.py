"""Find published models in table.json by any spelling of their names.

An entry has other names with the same shape (`also`), the sources of its values as [repository,
file, commit], and either the model's `size`, measured with transformers, or the `config` of a
native family."""

import functools
import json
import re
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parent / "table.json"
_WORD = re.compile(r"[ae]\d+(?:\.\d+)?b|\d+(?:\.\d+)*[bkm]?|[a-z]+")  # such as a3b, 2.5, 8b, qwen
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
    all its words. Of these names, those with the fewest other words are returned."""
    label = text.rpartition("/")[2].lower()
    words = set(_WORD.findall(label))
    ranks = {}
    for name in read_table():
        own_label = name.rpartition("/")[2].lower()
        own_words = set(_WORD.findall(own_label))
        num_others = len(set(filter(str.isalpha, own_words - words)) - _OFTEN_OMITTED)
        ranks[name] = len(words - own_words), num_others
        if re.sub(r"\W|_", "", own_label) == re.sub(r"\W|_", "", label):
            ranks[name] = 0, -1
    best = min(ranks.values())
    num_missing, _ = best
    names = [name for name, rank in ranks.items() if rank == best]
    return (names, num_missing == 0) if num_missing < len(words) else ([], False)
