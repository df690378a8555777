"""Find published models in table.json by any spelling of their names.

An entry has other names with the same shape (`also`), each with its source as [repository, file,
commit], the sources of its own values, its number of `parameters`, and either the model's `size`,
measured with transformers, or its `config`, if models/hub/dense.py computes the size. The entry of
a model that is not supported has its `config` and the reason (`refused`)."""

import difflib
import functools
import json
import math
import re
from pathlib import Path
from typing import Any

Entries = dict[str, dict[str, Any]]
TABLE = Path(__file__).parent / "table.json"
# Such as a3b, a400m, 2.5, 8b, qwen
_WORD = re.compile(r"[era]\d+(?:\.\d+)?[bm]|\d+(?:\.\d+)*[bkm]?|[a-z]+")
_SIZE = re.compile(r"([1-9]\d*(?:\.\d+)?|0\.\d*[1-9])b")  # billions of parameters
# Words that name no family
_VARIANTS = {
    "base", "chat", "code", "coder", "flash", "instruct", "it", "large", "math", "medium", "mini",
    "nano", "pro", "pt", "reasoning", "small", "think", "thinking", "v",
}  # fmt: skip
_OFTEN_OMITTED = {"base", "hf", "it", "meta", "pt", "v"}
_NEAR = 0.15  # largest logarithm of a ratio of sizes that counts as rounding


@functools.cache
def read_table(*, refused: bool = False) -> Entries:
    """Return the entries of supported or of refused models by name. Other names of an entry precede
    its first name."""
    entries: Entries = {}
    for name, entry in json.loads(TABLE.read_text()).items():
        if refused == ("refused" in entry):
            entries |= dict.fromkeys([*entry["also"], name], entry)
    return entries


def match_names(text: str, entries: Entries) -> tuple[list[str], bool]:
    """Return the names that differ least from `text`, without its owner, and whether they contain
    all its words. Names of the same family come first, then those of the nearest size, and of these
    those with the fewest other words. Words that are spelled almost like a name's count as equal
    to find the nearest names only."""
    label = _label(text.replace("+", " plus"))
    known = {word for name in entries for word in _WORD.findall(_label(name))}
    typed = set(_WORD.findall(label))
    unknown = set(filter(str.isalpha, typed - known))
    words = (typed - unknown) | {_nearest(word, known) for word in unknown}
    size = _SIZE.search(label)
    ranks = {}
    for name, entry in entries.items():
        own_label = _label(name).replace("_", ".")
        own_words = set(_WORD.findall(own_label))
        missing = words - own_words
        own_size = _SIZE.search(own_label)
        billions = float(own_size[1]) if own_size else entry.get("parameters", 1) / 1e9
        distance = abs(math.log(float(size[1]) / billions)) if size else 0.0
        if size and not own_size and distance < _NEAR:
            missing -= {size[0]}
            distance = 0.0
        num_others = len(set(filter(str.isalpha, own_words - words)) - _OFTEN_OMITTED)
        num_families = sum(map(str.isalpha, missing - _VARIANTS))
        ranks[name] = num_families, distance, len(missing), num_others
        if re.sub(r"[\s_-]", "", _label(name)) == re.sub(r"[\s_-]", "", label):
            ranks[name] = 0, 0, 0, -1
    best = min(ranks.values())
    num_families, _, num_missing, _ = best
    if num_families == sum(map(str.isalpha, words - _VARIANTS)):
        return [], False
    names = [name for name, rank in ranks.items() if rank == best]
    return names, num_missing == 0 and words == typed


def _label(name: str) -> str:
    """Return a name without its owner, in lower case, with versions such as 4.0 as 4."""
    return re.sub(r"(?<=\d)\.0\b", "", name.rpartition("/")[2].lower())


def _nearest(word: str, known: set[str]) -> str:
    """Return the known word that is spelled almost like `word`, or else `word`."""
    matches = difflib.get_close_matches(word, known, n=1, cutoff=0.75)
    return matches[0] if matches else word
