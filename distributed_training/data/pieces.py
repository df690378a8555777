"""Kinds of text, and running text in pieces whose ids in a row are the ids of the whole."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from distributed_training.settings.errors import UserError

RUNNING = "running text"
TEXT = "text"
PROMPT = "prompt"
MESSAGES = "messages"
ANSWERS = (PROMPT, MESSAGES)  # forms in which only the answers are in the loss
ASSISTANT = "assistant"
Message = dict[str, Any]  # role, content, and whatever else a template reads
Span = tuple[int, int]  # first character, and one after the last
_MIN = 2**15
_WHOLE = 2**27  # characters of a text that cannot be cut: its tokens take 40 times the memory
# Pre-tokenizers of byte-level BPE (see Tokenizer.can_cut) end a part before a space that follows
# anything else, and before a line feed that follows a letter or digit.
_BREAK = re.compile(r"(?<=[^\s\u180e]) |(?<=[A-Za-z0-9\u4e00-\u9fff])\n")


class Piece(NamedTuple):
    """A text to tokenize, or a part of one."""

    text: str
    spans: Sequence[Span] | None = None  # what is in the loss; None: all
    begins: bool = True  # whether the text begins here
    ends: bool = True  # whether it ends here
    templated: bool = False  # whether a template wrote all special tokens, those at the ends too
    eos: bool = True  # whether end-of-text follows


def cut_text(blocks: Iterable[str], *, can_cut: bool = True) -> Iterator[Piece]:
    """Cut a text into pieces whose ids in a row are the ids of the whole text; none of a blank one.
    Raises UserError for a text that is too long to be tokenized at once and cannot be cut."""
    rest = ""
    start = 0
    begins = True
    for block in blocks:
        rest = rest[start:] + block
        start = 0
        while can_cut and len(rest) - start > _MIN:
            found = _BREAK.search(rest, start + _MIN)
            if found is None:
                break
            yield Piece(rest[start : found.start()], begins=begins, ends=False)
            start = found.start()
            begins = False
        if len(rest) - start > _WHOLE:
            what = f"a text of more than {_WHOLE / 1e6:.0f} million characters cannot be tokenized"
            why = "this tokenizer reads a text as a whole" if not can_cut else "it has no spaces"
            raise UserError(what, why, 'divide it into records: a line {"text": "..."} each')
    if not begins or rest.strip():
        yield Piece(rest[start:], begins=begins)


def cut_lines(parts: Iterable[str]) -> Iterator[Piece]:
    """Cut parts that are whole lines into a text per line that is not blank."""
    for part in parts:
        yield from (Piece(line) for line in part.splitlines() if line.strip())
