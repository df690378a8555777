"""Find the tokens of a text's answers, based on the offsets of tokens in characters."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from distributed_training.data.pieces import Span
from distributed_training.settings.files import shown


def mask_spans(
    text: str, spans: Sequence[Span], pairs: Sequence[tuple[int, int]], normalizer: Any
) -> np.ndarray:
    """Return whether each token is in the loss, given the tokens' offsets, `pairs`, and the
    normalizer from the `tokenizers` library. Raises ValueError if the offsets are wrong.

    As in transformers, a token is in the loss if at least one of its characters is in the loss.
    However, the first or last token of a span is excluded if it shares only white space with the
    span but contains other characters."""
    firsts, lasts = _correct(text, pairs, normalizer)
    mask = np.zeros(len(firsts), bool)
    for first, last in spans:
        tokens = np.flatnonzero((lasts > first) & (firsts < last)).tolist()
        for edge in (0, -1):
            if not tokens:
                break
            start, end = int(firsts[tokens[edge]]), int(lasts[tokens[edge]])
            shared = text[max(start, first) : min(end, last)]
            if not shared.strip() and text[start:end].strip():
                del tokens[edge]
        mask[tokens] = True
    return mask


def _correct(
    text: str, pairs: Sequence[tuple[int, int]], normalizer: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Return (index of the first character, index after the last character) for each token. Raises
    ValueError if a character has no token: the library then shifts the offsets of the following
    tokens in the same word, so that no token covers the end of the word."""
    offsets = np.array(pairs, np.int64).reshape(-1, 2)
    lasts = np.maximum.accumulate(offsets[:, 1])
    previous_ends = np.concatenate([[0], lasts])
    next_starts = np.concatenate([offsets[:, 0], [len(text)]])
    for index in np.flatnonzero(next_starts > previous_ends):
        end = previous_ends[index]
        gap = text[end : next_starts[index]]
        if normalizer is not None:
            # The normalizer may remove characters, or join accents to the letter before them.
            letter = text[:end][-1:]
            length = len(normalizer.normalize_str(letter))
            gap = normalizer.normalize_str(letter + gap)[length:]
        if gap.strip(" \u2581"):
            what = f"some characters have no token, so the positions near {shown(gap)} are wrong"
            raise ValueError(what)
    # Some tokenizers exclude spaces from their tokens' offsets. Let each token begin where the
    # previous token ends.
    return np.minimum(offsets[:, 0], previous_ends[:-1]), lasts
