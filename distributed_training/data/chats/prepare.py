"""Records -> what is tokenized, with what is left out of them, counted."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed_training.data import pieces
from distributed_training.data.chats.render import Conversation
from distributed_training.data.corpus import Source
from distributed_training.data.files import has_added_nulls
from distributed_training.data.pieces import Piece
from distributed_training.data.tokenizer import Tokenizer

SPECIAL = "records have special tokens in their text, and these count as such tokens"
THOUGHTS = "answers lose their thoughts: the chat template leaves them out"
UNENDED = "answers have no special token at their end, from which a model learns to stop"
QUOTED = (
    "records have tool calls whose arguments are a string that the chat template quotes again: "
    "give an object"
)
COPIED = 'records have a "text" beside their answer, which is not read: --columns text=text does'
NO_ANSWER = "no answer to train on"
_AT_ONCE = 64  # conversations that are rendered at a time


@dataclass(slots=True)
class Counts:
    """What became of the records of a split."""

    records: int = 0  # read; of running text, its texts or lines
    left_out: Counter[str] = field(default_factory=Counter)  # records, by reason
    notes: Counter[str] = field(default_factory=Counter)  # by the rest of a line about so many

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "records": self.records,
            "used": self.records - self.left_out.total(),
            "left_out": dict(self.left_out),
            "notes": dict(self.notes),
        }


def read_pieces(
    source: Source, tokenizer: Tokenizer, *, by_line: bool, counts: Counts
) -> Iterator[Piece]:
    """What is tokenized of a source, in its order."""
    if source.form == pieces.RUNNING:
        for piece in source.read_texts(by_line=by_line, can_cut=tokenizer.can_cut):
            counts.records += piece.begins
            yield piece
        return
    batch = list[tuple[str, Conversation]]()
    for item in check_records(source, tokenizer, counts):
        if isinstance(item, tuple):
            batch.append(item)
            if len(batch) == _AT_ONCE:
                yield from _rendered(batch, tokenizer, counts)
                batch = []
        else:
            yield from item
    yield from _rendered(batch, tokenizer, counts)


def check_records(source: Source, tokenizer: Tokenizer, counts: Counts) -> Iterator[Any]:
    """A list of pieces for each record that is text, (where, conversation) for others; what needs
    no template is checked and counted."""
    shape = source.shape
    assert shape is not None
    talks = tokenizer.talks(source.form)
    for where, record in source.read_records():
        counts.records += 1
        counts.notes[COPIED] += shape.has_copy
        if talks:
            drop_nulls = (
                has_added_nulls(Path(where.rpartition(" row ")[0])) if " row " in where else False
            )
            found = shape.conversation(record, where, counts.notes, drop_nulls=drop_nulls)
            answers = [i for i, m in enumerate(found.messages) if m["role"] == pieces.ASSISTANT]
            if not set(answers).difference(found.skip):
                counts.left_out[NO_ANSWER] += 1
            else:
                yield where, found
        elif source.form == pieces.TEXT:
            text = shape.text(record, where)
            if text.strip():
                yield list(pieces.cut_text([text], can_cut=tokenizer.can_cut))
            else:
                counts.left_out["no text"] += 1
        else:
            prompt, completion = shape.pair(record, where)
            if completion.strip():
                spans = [(len(prompt), len(prompt) + len(completion))]
                yield [Piece(prompt + completion, spans)]
            else:
                counts.left_out[NO_ANSWER] += 1


def _rendered(
    batch: list[tuple[str, Conversation]], tokenizer: Tokenizer, counts: Counts
) -> Iterator[Piece]:
    if not batch:
        return
    templated = tokenizer.is_templated
    for (_, conversation), samples in zip(batch, tokenizer.align(batch), strict=True):
        if not samples:
            counts.left_out[NO_ANSWER] += 1
        contents = (message.get("content") for message in conversation.messages)
        said = "\n".join(content for content in contents if isinstance(content, str))
        if tokenizer.special_pattern.search(said):
            counts.notes[SPECIAL] += 1
        texts = _arguments(conversation)
        counts.notes[QUOTED] += any(text in sample.text for text in texts for sample in samples)
        for sample in samples:
            counts.notes[THOUGHTS] += sample.thoughts_removed
            counts.notes[UNENDED] += sample.unended
            yield Piece(sample.text, sample.spans, templated=templated, eos=False)


def _arguments(conversation: Conversation) -> list[str]:
    """Arguments of tool calls that are strings, as OpenAI has them, quoted."""
    calls = (call for message in conversation.messages for call in message.get("tool_calls") or [])
    parts = (call.get("function", call) for call in calls if isinstance(call, dict))
    given = (part.get("arguments") for part in parts if isinstance(part, dict))
    return [json.dumps(text, ensure_ascii=False) for text in given if isinstance(text, str)]
