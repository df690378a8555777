"""Count the bytes of text that each token represents, so that losses can be compared across
tokenizers."""

import json
import re

import numpy as np

from distributed_training.data.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # sentencepiece's token for a single byte


def count_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """Return the number of UTF-8 bytes of text that each id represents, int32 [num_tokens]. Special
    tokens represent 0 bytes.

    For the ids of a string, these numbers add up to the size of the normalized string.
    Normalization may, for example, add a space before the string or remove accents."""
    sizes = np.zeros(tokenizer.num_tokens, np.int32)
    backend = tokenizer.backend
    backend_settings = {} if backend is None else json.loads(backend.to_str())
    added_token_ids = {token["id"] for token in backend_settings.get("added_tokens", [])}
    # In a byte-level vocabulary, each character of a token stands for one byte.
    if '"ByteLevel"' in json.dumps(backend_settings.get("decoder")):
        for token, i in tokenizer.vocabulary.items():
            sizes[i] = len(token.encode()) if i in added_token_ids else len(token)
    else:
        first_ids = tokenizer.encode_texts(["a"])[0].tolist()
        first_size = _decoded_size(tokenizer, first_ids)
        for token, i in tokenizer.vocabulary.items():
            decoded_size = _decoded_size(tokenizer, [*first_ids, i]) - first_size
            sizes[i] = 1 if _BYTE.fullmatch(token) else max(0, decoded_size)
    sizes[tokenizer.special_ids] = 0
    return sizes


def _decoded_size(tokenizer: Tokenizer, ids: list[int]) -> int:
    return len(tokenizer.decode(ids, skip_special_tokens=False).encode())
