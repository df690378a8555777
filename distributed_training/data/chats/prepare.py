"""Convert records into pieces of text for tokenization, and count the records that are left out."""

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from distributed_training.data import pieces
from distributed_training.data.chats.align import join_parts, loses_thoughts
from distributed_training.data.chats.records import OUTPUT_KEYS, READ_KEYS, Record, read_record
from distributed_training.data.chats.render import Conversation
from distributed_training.data.corpus import Source
from distributed_training.data.pieces import Piece
from distributed_training.data.tokenizer import Tokenizer
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import shown

SPECIAL = "record with text that matches special tokens and is tokenized as special tokens"
UNKNOWN = "record with characters that are missing from the tokenizer's vocabulary and are lost"
THOUGHTS = "answer with reasoning that the chat template removes"
NO_END_TOKEN = "answer without a special token that teaches the model where to stop"
QUOTED = (
    "record with tool calls whose arguments are a string, which the chat template quotes again; "
    "write the arguments as an object"
)
COPIED = (
    'record with both a "text" and an answer; to train on the "text" instead of the answer, add '
    "--columns text=text"
)
OMITTED = "that the chat template omits from the text"  # after message, call or tool
EMPTY = "answer with empty content, which can only teach the model to say nothing"
UNASKED = "answer that is trained after {}, although generation asks for it with {}"
IGNORED_COLUMNS = "record with columns that are ignored:"
IGNORED_KEY = "message with a key that is ignored, because the chat template does not read it:"
NO_ANSWER = "no answer to train on"
SEVERAL_TEXTS = "the chat template renders the answers of one conversation in several texts"
IDENTICAL = "pair with identical answers, which cannot teach a preference"


@dataclass
class Counts:
    """Counts for one split: the records read, the records left out for each reason, and the records
    or messages to which each note applies. A note tells the user about a peculiarity of the
    data."""

    records: int = 0  # records read or, for running text, documents or lines
    left_out: Counter[str] = field(default_factory=Counter)  # records left out, by reason
    forms: Counter[str] = field(default_factory=Counter)  # records, by form (data/pieces.py)
    # Number of records or messages, by note
    notes: Counter[str] = field(default_factory=Counter)


def read_pieces(
    source: Source, tokenizer: Tokenizer, *, by_line: bool, counts: Counts
) -> Iterator[Piece]:
    """Yield the pieces of text in a source, in order, and count the records in the source. Records
    with nothing to train on are left out. Raises UserError if a record has no known form."""
    if source.columns is None:
        for piece in source.read_texts(by_line=by_line, can_cut=tokenizer.can_cut):
            if piece.ends:
                counts.records += 1
            yield piece
        return
    missing = {*source.columns.values()}
    for where, raw in source.read_records():
        record, *others = records = read_record(raw, where, source.columns)
        missing -= raw.keys()
        counts.records += 1
        counts.forms[record.form] += 1
        if record.has_copy:
            counts.notes[COPIED] += 1
        if record.form == pieces.TEXT:
            text = record.read_text()
            if text.strip():
                yield from pieces.cut_text([text], can_cut=tokenizer.can_cut)
            else:
                counts.left_out["no text"] += 1
        else:
            notes = [Counter[str]() for _ in records]
            answers = [
                _read_answer(record, tokenizer, own_notes)
                for record, own_notes in zip(records, notes, strict=True)
            ]
            # A note about both answers of a pair applies to one record.
            counts.notes.update(notes[0] | notes[-1])
            if not all(answers):
                counts.left_out[NO_ANSWER] += 1
            elif others and max(map(len, answers)) > 1:
                counts.left_out[SEVERAL_TEXTS] += 1
            else:
                if others and answers[0] == answers[1]:
                    counts.notes[IDENTICAL] += 1
                yield from itertools.chain(*answers)
        if unread := record.find_unread():
            counts.notes[f"{IGNORED_COLUMNS} {shown(unread)}"] += 1
    if missing:
        what = f"--columns names {shown(sorted(missing)[0])}, but no record has such a column"
        raise UserError(what, fix="choose a column of the dataset")


def _read_answer(record: Record, tokenizer: Tokenizer, notes: Counter[str]) -> list[Piece]:
    """Return the pieces of a record with answers, and count the `notes` that apply. Without an
    answer to train on, there are no pieces."""
    if tokenizer.is_chat_form(record.form) and not record.is_plain:
        return _render(record.where, record.read_conversation(notes), tokenizer, notes)
    prompt, completion = record.read_pair()
    spans = [(len(prompt), len(prompt) + len(completion))]
    return [Piece(prompt + completion, spans)] if completion.strip() else []


def _render(
    where: str, conversation: Conversation, tokenizer: Tokenizer, notes: Counter[str]
) -> list[Piece]:
    """Return the pieces of a conversation, and count the `notes` that apply."""
    samples = tokenizer.renderer.render_samples(conversation, where)
    for message in conversation.messages:
        for key in sorted(message.keys() - READ_KEYS - tokenizer.renderer.words):
            notes[f"{IGNORED_KEY} {shown(key)}"] += 1
    for kind in tokenizer.renderer.find_omitted(conversation):
        notes[f"{kind} {OMITTED}"] += 1
    if not samples:
        return []
    contents = [message["content"] for message in join_parts(conversation.messages)]
    if tokenizer.special_pattern.search("\n".join(contents)):
        notes[SPECIAL] += 1
    rendered = "\n".join(sample.text for sample in samples)
    called_functions = conversation.called_functions
    arguments = [function.get("arguments") for function in called_functions]
    strings = [value for value in arguments if isinstance(value, str)]
    if any(json.dumps(string, ensure_ascii=False) in rendered for string in strings):
        notes[QUOTED] += 1
    trained_text = "\n".join(
        sample.text[first:last] for sample in samples for first, last in sample.spans
    )
    for index, message in enumerate(conversation.messages):
        if message["role"] != pieces.ASSISTANT or index in conversation.skip:
            continue
        if loses_thoughts(message, trained_text):
            notes[THOUGHTS] += 1
        if not any(message.get(key) for key in ("content", *OUTPUT_KEYS)):
            notes[EMPTY] += 1
    for sample in samples:
        if sample.unasked:
            notes[UNASKED.format(*map(shown, sample.unasked))] += 1
        if sample.num_without_end_token:
            notes[NO_END_TOKEN] += sample.num_without_end_token
    return [Piece(sample.text, sample.spans, templated=True) for sample in samples]
