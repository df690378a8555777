"""Texts and records as pieces, each of which is tokenised by itself. No torch import.

Chats have a template of our own, where the tokenizer brings none:

    user: What is 2 + 2?
    assistant: 4<|endoftext|>user: And 3 + 3?
    assistant: 6<|endoftext|>

Of a record with a prompt or with messages only answers are learnt: completions and what the
assistant says, each with the end-of-text token after it."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

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


class ChatTemplate:
    """A model's own: a Jinja template in Hugging Face's convention, run in a sandbox."""

    def __init__(self, text: str, eos_token: str, bos_token: str) -> None:
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(words: str) -> NoReturn:
            raise ValueError(words)

        self.text = text
        self.eos = eos_token
        sandbox = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        sandbox.filters["tojson"] = json.dumps
        sandbox.globals |= {"eos_token": eos_token, "bos_token": bos_token}
        sandbox.globals["raise_exception"] = refuse
        self._template = sandbox.from_string(text)

    def render(self, messages: Sequence[Message], *, ask: bool = False) -> str:
        """The text of a conversation; with `ask` up to where the next answer begins."""
        return self._template.render(messages=messages, add_generation_prompt=ask)

    def cut(self, messages: Sequence[Message], where: str) -> list[Piece]:
        """What a template makes of a conversation, of which the answers are learnt; where it shows
        earlier ones otherwise once there are later ones, as without their thoughts, only those."""
        pieces = list[Piece]()
        done = ""
        try:
            for place, message in enumerate(messages):
                if message["role"] == ASSISTANT:
                    whole = self.render(messages[: place + 1])
                    begun = self.render(messages[:place], ask=True)
                    asked = os.path.commonprefix([begun, whole])  # noqa: RUF071, no paths
                    if not asked.startswith(done):
                        pieces = []
                        done = ""
                    pieces.append(Piece(asked[len(done) :], in_loss=False, eos=False, ends=False))
                    pieces.append(Piece(whole[len(asked) :], eos=False, ends=False))
                    done = whole
        except Exception as error:  # what a template raises is its own affair
            raise UserError(f"{where} does not go with the chat template", str(error)) from None
        # What is to end the text ends it once.
        eos = not done.rstrip().endswith(self.eos)
        return [*pieces[:-1], pieces[-1]._replace(eos=eos, ends=True)] if pieces else []

    def end_of_answer(self) -> str:
        """What follows an answer."""
        said = [{"role": "user", "content": "?"}, {"role": ASSISTANT, "content": "answered"}]
        return self.render(said).rpartition("answered")[2].strip()


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


def cut_lines(parts: Iterable[str]) -> Iterator[Piece]:
    """Every line that is not blank, as a text; of parts that are whole lines."""
    for part in parts:
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


def cut_record(record: Any, form: str, where: str, chat: ChatTemplate | None) -> list[Piece]:
    """The pieces of a record, none where there is nothing to learn in it, through the model's own
    template if it has one. Raises UserError for a record of another form."""

    def check(values: Any, name: str, kind: type = str, place: str = where) -> None:
        if not isinstance(values, dict) or not isinstance(values.get(name), kind):
            word = "string" if kind is str else "list"
            raise UserError(f'{place} has no "{name}" {word}', fix=_EXAMPLES[form])

    if form == TEXT:
        check(record, TEXT)
        return list(cut_text([record[TEXT]]))
    if form == MESSAGES:
        check(record, MESSAGES, list)
        messages = record[MESSAGES]
        for message in messages:
            check(message, "role", place=f"{where}: a message")
            check(message, "content", place=f"{where}: a message")
        return chat.cut(messages, where) if chat else cut_messages(messages)
    check(record, PROMPT)
    check(record, "completion")
    answer = record["completion"]
    if not answer.strip():
        return []
    if chat:
        asked = {"role": "user", "content": record[PROMPT]}
        return chat.cut([asked, {"role": ASSISTANT, "content": answer}], where)
    return [Piece(record[PROMPT], in_loss=False, eos=False, ends=False), Piece(answer)]


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
