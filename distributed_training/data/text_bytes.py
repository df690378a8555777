"""Count the bytes of text that each token represents, so that losses can be compared across
tokenizers."""

import json
import re
from typing import Any

import numpy as np

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # sentencepiece's token for a single byte


def count_bytes(tokenizer: Any, special_ids: np.ndarray, num_tokens: int) -> np.ndarray:
    """Return the number of UTF-8 bytes of text that each id represents, int32 [num_tokens]. Special
    tokens represent 0 bytes.

    For the ids of a string, these numbers add up to the size of the normalized string.
    Normalization may, for example, add a space before the string or remove accents. `tokenizer` is
    an object from transformers."""
    sizes = np.zeros(num_tokens, np.int32)
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    backend_settings = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {}
    added_token_ids = {token["id"] for token in backend_settings.get("added_tokens", [])}
    # In a byte-level vocabulary, each character of a token stands for one byte.
    if '"ByteLevel"' in json.dumps(backend_settings.get("decoder")):
        for token, i in vocabulary.items():
            sizes[i] = len(token.encode()) if i in added_token_ids else len(token)
    else:
        first_ids = list(tokenizer.encode("a", add_special_tokens=False))
        first_size = _decoded_size(tokenizer, first_ids)
        for token, i in vocabulary.items():
            decoded_size = _decoded_size(tokenizer, [*first_ids, i]) - first_size
            sizes[i] = 1 if _BYTE.fullmatch(token) else max(0, decoded_size)
    sizes[special_ids[special_ids < num_tokens]] = 0
    return sizes


def _decoded_size(tokenizer: Any, ids: list[int]) -> int:
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    return len(tokenizer.decode(ids, **options).encode())
