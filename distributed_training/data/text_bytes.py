"""Count the bytes of text that tokens stand for, which makes losses comparable across
tokenizers."""

import json
import re
from typing import Any

import numpy as np

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # sentencepiece's token for a single byte


def count_bytes(tokenizer: Any, special_ids: np.ndarray, num_tokens: int) -> np.ndarray:
    """Return the number of UTF-8 bytes of text that each id stands for, int32 [num_tokens]. Special
    tokens have 0.

    The sum over a text's ids is the size of the text as the tokenizer normalizes it: with a space
    that some tokenizers add before a text, and without accents that others remove. `tokenizer` may
    belong to transformers or to the library `tokenizers`."""
    sizes = np.zeros(num_tokens, np.int32)
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    library = getattr(tokenizer, "backend_tokenizer", tokenizer)
    described = json.loads(library.to_str()) if hasattr(library, "to_str") else {}
    added = {token["id"] for token in described.get("added_tokens", [])}
    if '"ByteLevel"' in json.dumps(described.get("decoder")):  # Each character stands for a byte.
        for token, i in vocabulary.items():
            sizes[i] = len(token.encode()) if i in added else len(token)
    else:
        first = list(tokenizer.encode("a", add_special_tokens=False))
        alone = len(_decode(tokenizer, first).encode())
        for token, i in vocabulary.items():
            decoded = len(_decode(tokenizer, [*first, i]).encode()) - alone
            sizes[i] = 1 if _BYTE.fullmatch(token) else max(0, decoded)
    sizes[special_ids[special_ids < num_tokens]] = 0
    return sizes


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
