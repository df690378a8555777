"""Define the forms of training text, and cut documents into pieces. Concatenating the ids of the
pieces gives the ids of the whole document."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from distributed_training.settings.errors import UserError

RUNNING = "running text"
TEXT = "text"
PROMPT = "prompt"
MESSAGES = "messages"
ASSISTANT = "assistant"
Message = dict[str, Any]  # role, content, and any other keys that a template reads
Span = tuple[int, int]  # (index of the first character, index after the last character)
_MIN_CHARACTERS = 2**15  # minimum length of a piece, except for the last piece of a document
# Maximum number of characters tokenized at once. Tokenizing needs 40 times as much memory as the
# text.
_MAX_UNCUT = 2**27
# Byte-level BPE pre-tokenizers (see data/splits.py) split before a space that follows a
# non-white-space character, and before a line feed that follows a letter or digit.
_BREAK = re.compile(r"(?<=[^\s\u180e]) |(?<=[A-Za-z0-9\u4e00-\u9fff])\n")


class Piece(NamedTuple):
    """A document to tokenize, or a contiguous section of one."""

    text: str
    spans: Sequence[Span] | None = None  # characters in the loss; None if all are
    ends: bool = True  # whether the document ends with this piece
    # True if a chat template wrote all special tokens. Otherwise, the document gets those that the
    # tokenizer adds, and ends with an end-of-text token.
    templated: bool = False


def cut_text(blocks: Iterable[str], *, can_cut: bool = True) -> Iterator[Piece]:
    """Cut a document, given as `blocks` of text, into pieces. A blank document yields no pieces.

    Concatenating the ids of the pieces gives the ids of the whole document. Raises UserError if the
    document is too long to be tokenized at once and cannot be cut."""
    pending = ""
    start = 0
    is_cut = False
    for block in blocks:
        pending = pending[start:] + block
        start = 0
        while can_cut and len(pending) - start > _MIN_CHARACTERS:
            boundary = _BREAK.search(pending, start + _MIN_CHARACTERS)
            if boundary is None:
                break
            yield Piece(pending[start : boundary.start()], ends=False)
            start = boundary.start()
            is_cut = True
        if len(pending) - start > _MAX_UNCUT:
            what = (
                f"text of more than {_MAX_UNCUT / 1e6:.0f} million characters cannot be tokenized"
            )
            why = "it has no spaces to split it at" if can_cut else "the tokenizer needs whole text"
            fix = 'split it into records, one per line: {"text": "..."}'
            raise UserError(what, why, fix)
    if is_cut or pending.strip():
        yield Piece(pending[start:])


def cut_lines(blocks: Iterable[str]) -> Iterator[Piece]:
    """Yield one piece per line of `blocks`, which contain only whole lines. Blank lines are
    skipped."""
    for block in blocks:
        # `splitlines` would also end lines at form feeds and similar characters.
        yield from (Piece(line) for line in block.split("\n") if line.strip())
