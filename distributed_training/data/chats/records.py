"""Recognize the shape of a dataset's records, and decide which part of a record is in the loss."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from distributed_training.data.chats.render import Conversation
from distributed_training.data.pieces import ASSISTANT, MESSAGES, PROMPT, TEXT, Message
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import shown

COLUMNS = (
    TEXT, MESSAGES, "conversations", PROMPT, "completion", "response", "question", "answer",
    "instruction", "input", "output", "system", "history", "tools", "documents",
    "chat_template_kwargs",  # as in TRL
)  # fmt: skip
_EXAMPLES = {
    TEXT: '{"text": "..."}',
    PROMPT: '{"prompt": "...", "completion": "..."}',
    MESSAGES: '{"messages": [{"role": "user", "content": "..."}, '
    '{"role": "assistant", "content": "..."}]}',
}
# Pairs of columns that contain a question and its answer, in order of preference
_COLUMN_PAIRS = (
    (PROMPT, "completion"), (PROMPT, "response"), ("question", "answer"),
    ("instruction", "output"), ("instruction", "response"),
)  # fmt: skip
# Role in the dataset -> role that the chat template receives; "" keeps the name of the role
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys((ASSISTANT, "gpt", "model", "bot", "chatgpt"), ASSISTANT),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    **dict.fromkeys(("system", "developer", "function", "ipython", "documents"), ""),
    "function_call": ASSISTANT,
}
# Keys that mark whether a message is in the loss: one from OpenAI, two from axolotl, two from verl
# and one from ms-swift
_TRAIN_KEYS = ("weight", "train", "training", "trainable", "loss_mask", "loss")
# Keys besides "content" whose values the model generates in an answer
_OUTPUT_KEYS = {"tool_calls", "reasoning_content", "reasoning", "thinking"}
_IGNORED_MARKS = (
    "messages have a training mark that is ignored, because only answers are in the loss"
)
_TWO_SYSTEMS = (
    "records have a system column that is not read, because the messages already begin with a "
    "system message"
)
# Columns that only a chat template can render
_CONTEXT_COLUMNS = ("system", "history", "tools", "documents")
Notes = Counter[str]  # number of records or messages, by note


class Shape:
    """Shape of the records in a dataset, recognized from the first record.

    `columns` maps column names that this module knows to the corresponding names in the dataset.
    `names` contains the names of all columns and may be omitted if `record` has all of them. Raises
    UserError if `record` lacks a column that `columns` names, or has no known column."""

    def __init__(
        self, record: Any, where: str, columns: Mapping[str, str], names: Iterable[str] = ()
    ) -> None:
        self.columns = columns
        if not isinstance(record, dict):
            raise UserError(f"{where} is not a JSON object", fix=f"write {_EXAMPLES[TEXT]}")
        fields = self._rename_columns(record)
        missing = [name for name in columns.values() if name not in record]
        if missing:
            what = f"--columns names {shown(missing[0])}, but {where} has no such column"
            raise UserError(what, f"the columns are {shown(list(record))}", "choose one of these")
        self.names: tuple[str, ...] = ()
        pair = next((pair for pair in _COLUMN_PAIRS if set(pair) <= fields.keys()), None)
        messages_column = next(
            (name for name in (MESSAGES, "conversations") if name in fields), None
        )
        # If a record has both a text and an answer, the text is usually a copy of the record that
        # was rendered for another model.
        answers = [fields[name] for name in (*(pair or ())[1:], messages_column) if name]
        self.has_copy = TEXT in fields and any(answers) and TEXT not in columns
        if TEXT in fields and not self.has_copy:
            self.form = TEXT
            self.names = (TEXT,)
        # Conversation datasets often repeat the first question as "prompt".
        elif pair and (MESSAGES not in fields or pair[1] == "completion"):
            has_messages = any(isinstance(fields[name], list) for name in pair)
            is_chat = (
                has_messages or pair[0] == "instruction" or fields.keys() & {*_CONTEXT_COLUMNS}
            )
            self.form = MESSAGES if is_chat else PROMPT
            self.names = pair
        elif messages_column:
            self.form = MESSAGES
            self.names = (messages_column,)
        else:
            column = "completion" if PROMPT in fields else TEXT
            fix = f"write {' or '.join(_EXAMPLES.values())}, or name your columns with --columns "
            fix += "prompt=QUESTION,completion=ANSWER"
            if PROMPT in columns and column == "completion":
                fix = f"add the column of the answers: --columns prompt={columns[PROMPT]},"
                fix += "completion=ANSWER"
            raise UserError(
                f'{where} has no "{column}" string', f"it has {shown(list(record))}", fix
            )
        self.unread = self._find_unread(fields, names or record)

    def _find_unread(self, fields: Mapping[str, Any], names: Iterable[str]) -> list[str]:
        """Return the columns in `names` that this class does not read. `fields` is the first record
        of the dataset."""
        used_columns = {*self.names}
        if self.form != TEXT:
            used_columns |= {*_CONTEXT_COLUMNS, "chat_template_kwargs"}
        if len(self.names) == 1 or isinstance(fields[self.names[0]], list):
            used_columns.discard("history")  # the messages contain it
        elif self.names[0] == "instruction":
            used_columns.add("input")
        if self.has_copy:  # The copy has a separate note.
            used_columns.add(TEXT)
        used_names = {self.columns.get(name, name) for name in used_columns}
        return [name for name in names if name not in used_names]

    def _rename_columns(self, record: Mapping[str, Any]) -> dict[str, Any]:
        if not self.columns:
            return dict(record)
        renamed = {name: record.get(dataset_name) for name, dataset_name in self.columns.items()}
        others = {key: value for key, value in record.items() if key not in self.columns.values()}
        return {**others, **renamed}

    def read_text(self, record: Any, where: str) -> str:
        """Return the text of a record. Raises UserError if the record has no text."""
        (text,) = self._read_strings(record, where)
        return text

    def read_pair(self, record: Any, where: str) -> tuple[str, str]:
        """Return (prompt, completion) from a record. Raises UserError if the prompt or the
        completion is missing."""
        prompt, completion = self._read_strings(record, where)
        return prompt, completion

    def read_conversation(self, record: Any, where: str, notes: Notes) -> Conversation:
        """Return the conversation from a record, which must contain either messages or a question
        with its answer.

        Messages with unknown roles are counted in `notes`. Raises UserError if the record does not
        contain a valid conversation."""
        fields = self._check_record(record, where)
        skip: list[int] = []
        if len(self.names) == 1:
            raw_messages = _parse(fields.get(self.names[0]))
            if raw_messages is None:
                raw_messages = []
            messages = self._read_messages(raw_messages, where, notes)
        else:
            question, answer = (fields.get(name) for name in self.names)
            if isinstance(question, list):
                messages = self._read_messages(question, where, notes)
                skip = list(range(len(messages)))
            else:
                messages = self._question_messages(fields, where)
            if isinstance(answer, list):
                messages += self._read_messages(answer, where, notes)
            elif answer:
                answer = self._check(answer, self.names[1], where)
                messages.append({"role": ASSISTANT, "content": answer})
        system = fields.get("system")
        if isinstance(system, str) and system:
            if not messages or messages[0]["role"] != "system":
                messages = [{"role": "system", "content": system}, *messages]
                skip = [0, *(index + 1 for index in skip)]
            elif messages[0]["content"] != system:
                notes[_TWO_SYSTEMS] += 1
        for index, message in enumerate(messages):
            is_trained = _is_trained(message, f"{where}: message {index + 1}")
            if is_trained is False:
                skip.append(index)
            elif is_trained and message["role"] != ASSISTANT:
                notes[_IGNORED_MARKS] += 1
        tools, documents, template_kwargs = (
            self._check(_parse(fields.get(name)) or None, name, where, cls, optional=True)
            for name, cls in (("tools", list), ("documents", list), ("chat_template_kwargs", dict))
        )
        return Conversation(messages, tools, documents, template_kwargs or {}, skip)

    def _question_messages(self, fields: Mapping[str, Any], where: str) -> list[Message]:
        """Return the messages that precede the answer in a record with a question and its answer:
        optional earlier question-answer pairs, then the question. In the Alpaca format, the
        question is an instruction with an optional input."""
        history = _parse(fields.get("history")) or None
        messages = list[Message]()
        for turn in self._check(history, "history", where, list, optional=True) or []:
            texts = turn if isinstance(turn, list | tuple) else ()
            if len(texts) != 2 or not all(isinstance(text, str | None) for text in texts):
                what = f"{where}: {shown(turn)} in history is not a pair of strings"
                raise UserError(what, fix='write [["question", "answer"], ...]')
            messages.append({"role": "user", "content": texts[0] or ""})
            if texts[1]:
                messages.append({"role": ASSISTANT, "content": texts[1]})
        question = self._check(fields.get(self.names[0]), self.names[0], where)
        if self.names[0] == "instruction" and (context := fields.get("input")):
            question = f"{question}\n{self._check(context, 'input', where)}"
        return [*messages, {"role": "user", "content": question}]

    def _read_messages(self, raw_messages: Any, where: str, notes: Notes) -> list[Message]:
        self._check(raw_messages, self.names[0], where, list)
        return [_read_message(message, f"{where}: a message", notes) for message in raw_messages]

    def _read_strings(self, record: Any, where: str) -> list[str]:
        fields = self._check_record(record, where)
        missing = [name for name in self.names if name not in fields]
        if missing:
            self._check(None, missing[0], where)
        last_name = self.names[-1]  # null counts as empty
        fields[last_name] = fields[last_name] or ""
        return [self._check(fields[name], name, where) for name in self.names]

    def _check_record(self, record: Any, where: str) -> dict[str, Any]:
        if not isinstance(record, dict):
            self._check(None, self.names[0], where)
        return self._rename_columns(record)

    def _check(
        self, value: Any, name: str, where: str, cls: type = str, *, optional: bool = False
    ) -> Any:
        if not isinstance(value, cls) and not (optional and value is None):
            type_names: dict[type, str] = {str: "string", list: "list", dict: "object"}
            if value is not None:
                fix = f'remove "{name}"' if optional else f"write {_EXAMPLES[self.form]}"
                raise UserError(f'{where}: "{name}" is not a JSON {type_names[cls]}', fix=fix)
            why = f'all records must have the columns of the first record, such as "{name}"'
            fix = f"write {_EXAMPLES[self.form]}"
            raise UserError(f'{where} has no "{name}" {type_names[cls]}', why, fix)
        return value


def _read_message(raw: Any, where: str, notes: Notes) -> Message:
    """Return a message with the keys "role" and "content". If the dataset calls these keys "from"
    and "value", they are renamed. All other keys are kept. Raises UserError if the content is not
    text or a key has an unsupported value."""

    def refuse(key: str) -> NoReturn:
        raise UserError(f'{where} has no "{key}" string', fix=f"write {_EXAMPLES[MESSAGES]}")

    if not isinstance(raw, dict):
        refuse("role")
    message = dict(raw)
    if "role" not in message and "from" in message:
        message["role"] = message.pop("from")
    if "content" not in message and "value" in message:
        message["content"] = message.pop("value")
    role = message.get("role")
    if not isinstance(role, str):
        refuse("role")
    message["role"] = _ROLES.get(role) or role
    if role not in _ROLES:
        notes[f"messages have the unknown role {shown(role)}"] += 1
    if not isinstance(message.get("tool_calls") or [], list):
        what = f"{where} has tool_calls that are not a list: {shown(message['tool_calls'])}"
        raise UserError(what, fix='write [{"type": "function", "function": {...}}, ...]')
    content = message.get("content")
    if role == "function_call" and isinstance(content, str):
        parsed = _parse(content)
        calls = parsed if isinstance(parsed, list) else [parsed]
        if not all(isinstance(call, dict) for call in calls):
            what = f"{where} is a function_call, but its content is not a JSON object"
            raise UserError(what, f"the content is {shown(content)}")
        message |= {
            "content": "",
            "tool_calls": [{"type": "function", "function": c} for c in calls],
        }
    elif isinstance(content, list):
        for part in content:
            if not _is_text_part(part):
                what = f"{where} has a part that is not text: {shown(part)}"
                raise UserError(what, "only text is supported", "remove such records")
    elif content is None:
        if "content" not in message and not message.get("tool_calls"):
            refuse("content")
        message["content"] = ""
        if message["role"] == ASSISTANT and not _OUTPUT_KEYS & message.keys():
            message["weight"] = 0
            notes["answers have null content and do not count toward the loss"] += 1
    elif not isinstance(content, str):
        refuse("content")
    return message


def _is_trained(message: Message, where: str) -> bool | None:
    """Return whether the dataset marks a message as part of the loss. Return None if the message
    has no mark. Raises UserError if a mark is not 0 or 1."""
    values = {key: message[key] for key in _TRAIN_KEYS if message.get(key) is not None}
    unclear_keys = [key for key, value in values.items() if value not in (0, 1)]  # True is 1
    if message.get("train_detail"):  # axolotl's mark for parts of a message
        unclear_keys.append("train_detail")
    if unclear_keys:
        what = f"{where} has {shown(unclear_keys[0])}: {shown(message[unclear_keys[0]])}"
        raise UserError(
            what,
            "a message must be either entirely in the loss or entirely out of it",
            "set this key to 0 or 1, or remove it",
        )
    return all(values.values()) if values else None


def _is_text_part(part: Any) -> bool:
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )


def _parse(value: Any) -> Any:
    """Parse a list or object that a table stores as a JSON string. Return any other value
    unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value
