"""Where tokenizers of the `tokenizers` library split text before they look for tokens."""

import json
from typing import Any

# Pattern by which Llama 3 and Qwen 2 split text before the byte level. DIGITS is a quantifier.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
_LLAMA_3_SPLIT = {**_SPLIT, "pattern": {"Regex": _PATTERN.replace("DIGITS", "{1,3}")}}
_QWEN_2_SPLIT = {**_SPLIT, "pattern": {"Regex": _PATTERN.replace("DIGITS", "")}}
_NFC = {"type": "NFC"}
_PROBE = (
    "def f(x_1):\n\treturn x_1 ** 123456 - 0x7F  # don't WE'LL\r\n\n\n    naïve café, Ελλάδα "
    "Привет 日本語 हिन्दी 1½ 🙂"
)


def can_cut(backend: Any) -> bool:
    """Return whether data/pieces.py may cut documents. Concatenating the ids of the pieces then
    gives the ids of the whole document.

    Documents may be cut only if all of these conditions hold:

    - the tokenizer uses byte-level BPE;
    - the pre-tokenizer splits text before a space that follows a non-white-space character, and
      before a line feed that follows a letter or digit;
    - no added token contains a space or line feed, or strips white space."""
    settings = json.loads(backend.to_str())
    pre_tokenizer = settings["pre_tokenizer"] or {}
    *splits, last = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if settings["model"]["type"] != "BPE" or settings["normalizer"] not in (None, _NFC):
        return False
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return False
    # Without a split before it, the byte level splits text as in GPT-2.
    has_gpt2_split = splits == [] and last["use_regex"]
    has_own_split = splits in ([_LLAMA_3_SPLIT], [_QWEN_2_SPLIT]) and not last["use_regex"]
    return (has_gpt2_split or has_own_split) and not any(
        token["lstrip"]
        or token["rstrip"]
        or token["single_word"]
        or " " in token["content"]
        or "\n" in token["content"]
        for token in settings["added_tokens"]
    )


def split_probe(backend: Any) -> list[str]:
    """Return the pieces into which a tokenizer splits a text with many kinds of characters. The
    space at the beginning is a setting in tokenizer_config.json, so the pieces omit it."""
    text = backend.normalizer.normalize_str(_PROBE) if backend.normalizer else _PROBE
    splits = [(text, (0, 0))]
    if backend.pre_tokenizer:
        splits = backend.pre_tokenizer.pre_tokenize_str(text)
    return [piece.replace("\u2581", " ").lstrip("\u0120 ") for piece, _ in splits]
