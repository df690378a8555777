"""Texts and records as pieces, each of which is tokenised by itself. No torch import.

Chats have a template of our own, where the tokenizer brings none (data/chat.py):

    user: What is 2 + 2?
    assistant: 4<|endoftext|>user: And 3 + 3?
    assistant: 6<|endoftext|>

Of a record with a prompt or with messages only answers are learnt: completions and what the
assistant says, each with the end-of-text token after it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from distributed_training.data.files import split_lines
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import shown

RUNNING = "running text"
TEXT = "text"
PROMPT = "prompt"
MESSAGES = "messages"
ANSWERS = (PROMPT, MESSAGES)  # forms of which only a part is learnt
ASSISTANT = "assistant"
Message = dict[str, str]  # role, content
_EXAMPLES = {
    TEXT: '{"text": "..."}',
    PROMPT: '{"prompt": "...", "completion": "..."}',
    MESSAGES: '{"messages": [{"role": "user", "content": "..."}, '
    '{"role": "assistant", "content": "..."}]}',
}
_MIN = 2**15
_MAX = 2**20  # characters of a piece
_BREAK = re.compile(r"(?<=\S) |(?<=\w)\n")


class Piece(NamedTuple):
    """Part of a text."""

    text: str
    in_loss: bool = True  # whether its tokens are learnt
    eos: bool = True  # whether end-of-text follows
    ends: bool = True  # whether the text, or record, ends with it


def cut_text(blocks: Iterable[str]) -> Iterator[Piece]:
    """A text as pieces whose ids in a row are those of the whole text; none of a blank one.

    Byte-level BPE joins no character with a space after it, and no letter or digit with a line
    feed, so a text may be cut there; one without any for a million characters is cut all the same.
    """
    rest = ""
    start = 0
    is_cut = False
    for block in blocks:
        rest = rest[start:] + block
        start = 0
        while len(rest) - start > _MIN:
            found = _BREAK.search(rest, start + _MIN, start + _MAX)
            if found is None and len(rest) - start < _MAX:
                break
            end = found.start() if found else start + _MAX
            yield Piece(rest[start:end], eos=False, ends=False)
            start = end
            is_cut = True
    if is_cut or rest.strip():
        yield Piece(rest[start:])


def cut_lines(blocks: Iterable[str]) -> Iterator[Piece]:
    """Every line that is not blank, as a text."""
    for part in split_lines(blocks):
        yield from (Piece(line) for line in part.splitlines() if line.strip())


def find_form(record: Any, where: str) -> str:
    """TEXT, PROMPT or MESSAGES. Raises UserError for a record that is none of these."""
    keys = record if isinstance(record, dict) else {}
    # Datasets of chats often repeat the first question as "prompt".
    forms = [TEXT, MESSAGES, PROMPT] if "completion" not in keys else [TEXT, PROMPT, MESSAGES]
    for form in forms:
        if form in keys:
            return form
    why = f"it has {', '.join(map(shown, keys)) or 'no columns'}"
    raise UserError(f'{where} has no "text" string', why, "give " + " or ".join(_EXAMPLES.values()))


def cut_record(
    record: Any, form: str, where: str, cut: Callable[[list[Message], str], list[Piece]] | None
) -> list[Piece]:
    """The pieces of a record; none where there is nothing to learn in it. `cut` is that of the
    model's own chat template. Raises UserError for a record of another form."""
    if not isinstance(record, dict):
        raise _wrong(where, form, form)
    if form == MESSAGES:
        messages = _messages(record, where)
        return cut(messages, where) if cut else cut_messages(messages)
    for name in {TEXT: [TEXT], PROMPT: [PROMPT, "completion"]}[form]:
        if not isinstance(record.get(name), str):
            raise _wrong(where, name, form)
    if form == TEXT:
        return list(cut_text([record[TEXT]]))
    if not record["completion"].strip():
        return []
    if cut:
        asked = {"role": "user", "content": record[PROMPT]}
        return cut([asked, {"role": ASSISTANT, "content": record["completion"]}], where)
    prompt = Piece(record[PROMPT], in_loss=False, eos=False, ends=False)
    return [prompt, Piece(record["completion"])]


def _messages(record: dict[str, Any], where: str) -> list[Message]:
    if not isinstance(record.get(MESSAGES), list):
        raise _wrong(where, MESSAGES, MESSAGES, "list")
    for message in record[MESSAGES]:
        words = message if isinstance(message, dict) else {}
        for name in ("role", "content"):
            if not isinstance(words.get(name), str):
                raise _wrong(f"{where}: a message", name, MESSAGES)
    return list(record[MESSAGES])


def cut_messages(messages: Iterable[Message]) -> list[Piece]:
    """A conversation in our own template."""
    pieces = list[Piece]()
    before = ""
    for message in messages:
        if message["role"] == ASSISTANT:
            pieces.append(Piece(f"{before}{ASSISTANT}:", in_loss=False, eos=False, ends=False))
            pieces.append(Piece(f" {message['content']}", ends=False))
            before = ""
        else:
            before += f"{message['role']}: {message['content']}\n"
    # What follows the last answer is not learnt, and nothing follows from it.
    return [*pieces[:-1], pieces[-1]._replace(ends=True)] if pieces else []


def _wrong(where: str, name: str, form: str, kind: str = "string") -> UserError:
    return UserError(f'{where} has no "{name}" {kind}', fix=_EXAMPLES[form])
