"""Recognize the form of each record, and decide which part of it is in the loss."""

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from distributed_training.data.chats.render import Conversation
from distributed_training.data.pieces import ASSISTANT, MESSAGES, PROMPT, TEXT, Message
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import shown

COLUMNS = (
    TEXT,
    MESSAGES,
    "conversations",
    PROMPT,
    "completion",
    "chosen",
    "rejected",
    "response",
    "question",
    "answer",
    "instruction",
    "input",
    "context",
    "history",
    "output",
    "system",
    "tools",
    "chat_template_kwargs",  # as in TRL
)
_EXAMPLES = {
    TEXT: '{"text": "..."}',
    PROMPT: '{"prompt": "...", "completion": "..."}',
    MESSAGES: '{"messages": [{"role": "user", "content": "..."}, '
    '{"role": "assistant", "content": "..."}]}',
}
ANSWERS = ("chosen", "rejected")
PAIR_EXAMPLE = '{"prompt": "...", "chosen": "...", "rejected": "..."}'
# Columns with the prompt of two answers, in order of preference
_PROMPTS = (PROMPT, "question", "instruction", "input", "conversations")
# Columns of a conversation, of a question with its answer or of a text, in order of preference.
# Conversation datasets often repeat the first question as "prompt", and a text beside an answer is
# usually a copy of the record that was rendered for another model.
_FORMS = (
    (PROMPT, "completion"),
    (MESSAGES,),
    (PROMPT, "response"),
    ("question", "answer"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("conversations",),
    (TEXT,),
)
# Other names of roles -> role that the chat template receives
_ROLES = {
    "human": "user",
    "gpt": ASSISTANT,
    "model": ASSISTANT,
    "bot": ASSISTANT,
    "chatgpt": ASSISTANT,
    "function_call": ASSISTANT,
    "observation": "tool",
    "function_response": "tool",
}
# Roles that templates know by these names
_KNOWN_ROLES = {
    "user",
    ASSISTANT,
    "tool",
    "system",
    "developer",
    "function",
    "ipython",
    "documents",
}
# Keys that mark whether a message is in the loss: one from OpenAI, two from axolotl, two from verl
# and one from ms-swift
_TRAIN_KEYS = ("weight", "train", "training", "trainable", "loss_mask", "loss")
# Keys besides "content" whose values the model generates in an answer
OUTPUT_KEYS = ("tool_calls", "reasoning_content", "reasoning", "thinking")
# Keys of a message that this package reads, or for which it has other notes
READ_KEYS = {"role", "content", "function_call", "train_detail", *_TRAIN_KEYS, *OUTPUT_KEYS}
_IGNORED_MARKS = (
    "message with a training mark that is ignored, because only answers are in the loss"
)
_TWO_SYSTEMS = (
    "record with a system column that is not read, because the messages already begin with a "
    "system message"
)
# Columns that only a chat template can render
_CONTEXT_COLUMNS = {"system", "tools"}
_TYPE_NAMES: dict[type, str] = {str: "string", list: "list", dict: "JSON object"}
Notes = Counter[str]  # number of records or messages, by note


class Record:
    """One record of a dataset: its form, and the columns that are read.

    `columns` maps column names that this module knows to the corresponding names in the dataset.
    `where` is the record's location for error messages. Columns whose value is null or empty count
    as missing if another form has values. Raises UserError if the record has no known form."""

    is_plain = False  # True for texts that no chat template may render

    def __init__(self, raw: Any, where: str, columns: Mapping[str, str]) -> None:
        if not isinstance(raw, dict):
            raise UserError(f"{where} is not a JSON object", fix=f"write {_EXAMPLES[TEXT]}")
        self.fields = fields = dict(raw)
        for name in {*columns, *columns.values()}:
            fields.pop(name, None)
        for name, dataset_name in columns.items():
            if dataset_name in raw:
                fields[name] = raw[dataset_name]
        self.where = where
        self._raw = raw
        self._columns = columns

        forms = [names for names in _FORMS if fields.keys() >= {*names}]
        if TEXT in columns:
            forms = [(TEXT,)]
        if not forms:
            column = "completion" if PROMPT in fields else TEXT
            fix = f"write {' or '.join(_EXAMPLES.values())}, or name your columns with --columns "
            fix += "prompt=QUESTION,completion=ANSWER"
            if fields.keys() >= {*ANSWERS}:
                fix = "to learn from both answers, set preference to dpo"
            what = f'{where} has no "{columns.get(column, column)}" string'
            raise UserError(what, f"it has {shown(list(raw))}", fix)
        given = {name for name, value in fields.items() if not _is_empty(value)}
        answered = [names for names in forms if names[-1] in given and names != (TEXT,)]
        begun = [names for names in forms if names == (TEXT,) or not given.isdisjoint(names)]
        self.names: tuple[str, ...] = (answered or begun or forms)[0]
        self.form = MESSAGES
        if self.names == (TEXT,):
            self.form = TEXT
        elif len(self.names) == 2 and self.names[0] != "instruction":
            has_messages = any(isinstance(fields[name], list) for name in self.names)
            if not has_messages and fields.keys().isdisjoint(_CONTEXT_COLUMNS):
                self.form = PROMPT
        self.has_copy = self.form != TEXT and fields.get(TEXT) is not None
        # Names of the columns that have been read or, like a copy, have a separate note
        self._used = {TEXT} if self.has_copy else set[str]()

    def find_unread(self) -> list[str]:
        """Return the names of the columns with a value that has not been read."""
        used = {self._columns.get(name, name) for name in self._used}
        given = [name for name, value in self._raw.items() if value is not None]
        return [name for name in given if name not in used]

    def read_text(self) -> str:
        """Return the record's text, or "" if it is null. Raises UserError if it is not a string."""
        return self._read(TEXT) or ""

    def read_pair(self) -> tuple[str, str]:
        """Return (prompt, completion). The completion is "" if it is null. Raises UserError if one
        of them is not a string."""
        prompt, completion = self.names
        return self._read(prompt, optional=False), self._read(completion) or ""

    def read_conversation(self, notes: Notes) -> Conversation:
        """Return the conversation, which contains either messages or a question with its answer.

        Messages with unknown roles are counted in `notes`. Raises UserError if the record does not
        contain a valid conversation."""
        skip = []
        question = self.fields[self.names[0]]
        if len(self.names) == 1:
            messages = self._read_messages(self.names[0], notes)
        else:
            answer = self.fields[self.names[1]]
            if isinstance(question, list):
                messages = self._read_messages(self.names[0], notes)
                skip = list(range(len(messages)))
            else:
                # In the Alpaca format, earlier questions and answers are a list of pairs.
                pairs = [*(self._read("history", list) or []), [self._read_question()]]
                messages = [
                    _read_message({"role": role, "content": text}, self.where, notes)
                    for pair in pairs
                    for role, text in zip(("user", ASSISTANT), pair, strict=False)
                ]
            if isinstance(answer, list):
                messages += self._read_messages(self.names[1], notes)
            elif answer := self._read(self.names[1]):
                messages.append({"role": ASSISTANT, "content": answer})
        system = self._read("system")
        if system:
            if not messages or messages[0]["role"] != "system":
                messages = [{"role": "system", "content": system}, *messages]
                skip = [0, *(index + 1 for index in skip)]
            elif messages[0]["content"] != system:
                notes[_TWO_SYSTEMS] += 1
        for index, message in enumerate(messages):
            is_trained = _is_trained(message, f"{self.where}: message {index + 1}")
            if is_trained is False:
                skip.append(index)
            elif is_trained and message["role"] != ASSISTANT:
                notes[_IGNORED_MARKS] += 1
        tools = self._read("tools", list)
        for tool in tools or []:
            if not isinstance(tool, dict):
                what = f'{self.where}: "tools" has {_described(tool)} instead of an object'
                raise UserError(what, fix='write {"tools": [{"type": "function", ...}]}')
        template_kwargs = self._read("chat_template_kwargs", dict) or {}
        return Conversation(messages, tools, template_kwargs, skip)

    def _read_question(self) -> str:
        """Return the question of a record with a question and its answer. In the formats of Alpaca
        and Dolly, it is an instruction with an optional input or context."""
        question: str = self._read(self.names[0], optional=False)
        context = None
        if self.names[0] == "instruction":
            context = self._read("input") or self._read("context")
        return f"{question}\n{context}" if context else question

    def _read_messages(self, name: str, notes: Notes) -> list[Message]:
        messages = self._read(name, list) or []
        return [_read_message(raw, f"{self.where}: a message", notes) for raw in messages]

    def _read(self, name: str, cls: type = str, *, optional: bool = True) -> Any:
        """Return the value of a column, parsed if a table stores a list or object as a string.
        Return None if the value is null or an empty list or object. Raises UserError if the value
        has another type than `cls`, or if it is null and not `optional`."""
        self._used.add(name)
        value = self.fields.get(name)
        if cls is not str:
            value = _parse(value)
            if _is_empty(value):
                value = None
        if (value is None and optional) or isinstance(value, cls):
            return value
        example = _EXAMPLES[self.form]
        fix = f"write {example}" if name in self.names else f'remove "{name}"'
        name = self._columns.get(name, name)
        if value is None:
            raise UserError(f'{self.where} has no "{name}" {_TYPE_NAMES[cls]}', fix=fix)
        what = f'{self.where}: "{name}" is {_described(value)}, not a {_TYPE_NAMES[cls]}'
        raise UserError(what, fix=fix)


def read_record(raw: Any, where: str, columns: Mapping[str, str]) -> list[Record]:
    """Return a record or, if `columns` names ANSWERS, the chosen and the rejected answer, each as a
    record with its prompt. As in TRL, answers without a prompt both begin with it, and so do
    UltraFeedback's. Raises UserError if the record does not have two answers of one kind."""
    if ANSWERS[0] not in columns:
        return [Record(raw, where, columns)]
    fields = dict(raw) if isinstance(raw, dict) else {}
    fields |= {name: fields.pop(other, None) for name, other in columns.items()}
    given = [name for name in _PROMPTS if not _is_empty(fields.get(name))]
    prompt: Any = fields[given[0]] if given else None
    if given[:2] == ["instruction", "input"]:
        prompt += f"\n{fields['input']}"
    answers: list[Any] = [fields[name] for name in ANSWERS]
    answers = [[answer] if isinstance(answer, dict) else answer for answer in answers]
    first, second = answers
    is_chat = all(isinstance(answer, list) and answer for answer in answers)
    if not is_chat and not (isinstance(first, str) and isinstance(second, str)):
        why = f"it has {shown(list(raw) if isinstance(raw, dict) else raw)}"
        if "label" in fields:
            why += ". Single answers with a label (KTO) are not supported"
        fix = f"write {PAIR_EXAMPLE}, or name your columns with --columns chosen=GOOD,rejected=BAD"
        raise UserError(f"{where} has no two answers", why, fix)
    is_plain = not is_chat and prompt is None
    is_whole = is_chat and _read_message(first[0], where, Counter())["role"] != ASSISTANT
    if is_plain or is_whole:
        pairs = zip(first[:-1], second[:-1], strict=False)
        length = len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])
        if is_plain and first[:length].endswith(" "):
            length -= 1
        prompt, answers = first[:length], [answer[length:] for answer in answers]
    read = {*COLUMNS} - {*_CONTEXT_COLUMNS, "chat_template_kwargs"}
    rest = {name: value for name, value in fields.items() if name not in read}
    records = [Record(rest | {PROMPT: prompt, "completion": x}, where, {}) for x in answers]
    for record in records:
        record.is_plain = is_plain
    return records


def _read_message(raw: Any, where: str, notes: Notes) -> Message:
    """Return a message with the keys "role" and "content". If the dataset calls these keys "from"
    and "value", they are renamed. Keys whose value is null are left out, because a table cannot
    tell them from missing keys. All other keys are kept. Raises UserError if the content is not
    text or a key has an unsupported value."""
    if not isinstance(raw, dict):
        what = f'{where} is {_described(raw)}, not an object with a "role"'
        raise UserError(what, fix=f"write {_EXAMPLES[MESSAGES]}")
    message = {key: value for key, value in raw.items() if value is not None}
    for key, other_name in (("role", "from"), ("content", "value")):
        if key not in message and other_name in message:
            message[key] = message.pop(other_name)
    role = message.get("role")
    if not isinstance(role, str):
        raise _missing_string("role", message, where)
    message["role"] = _ROLES.get(role, role)
    if message["role"] not in _KNOWN_ROLES:
        notes[f"message with the unknown role {shown(role)}"] += 1
    call = message.get("function_call")
    if role == "function_call":
        call = message.get("content")
        message["content"] = ""
    if message["role"] == ASSISTANT and not _is_empty(call) and not message.get("tool_calls"):
        # OpenAI's older format has at most one call in an answer, under another key.
        message["tool_calls"] = _parse_calls(call, where)
    if not isinstance(message.get("tool_calls") or [], list):
        what = f"{where} has tool_calls that are not a list: {shown(message['tool_calls'])}"
        raise UserError(what, fix='write [{"type": "function", "function": {...}}, ...]')
    has_null_content = "content" in raw or "value" in raw
    if "content" not in message and not (has_null_content or message.get("tool_calls")):
        raise _missing_string("content", message, where)
    content = message.setdefault("content", None)
    if isinstance(content, list):
        _check_parts(content, where)
    elif content is None:
        message["content"] = ""
        if message["role"] == ASSISTANT and not any(message.get(key) for key in OUTPUT_KEYS):
            message["weight"] = 0
            notes["answer with null content, which does not count toward the loss"] += 1
    elif not isinstance(content, str):
        raise _missing_string("content", message, where)
    return message


def _missing_string(key: str, message: Message, where: str) -> UserError:
    why = f"it is {_described(message[key])}" if key in message else ""
    return UserError(f'{where} has no "{key}" string', why, f"write {_EXAMPLES[MESSAGES]}")


def _parse_calls(call: Any, where: str) -> list[Any]:
    """Return tool calls for the value of "function_call": a function, a list of functions, or the
    JSON of either."""
    parsed = _parse(call)
    functions = parsed if isinstance(parsed, list) else [parsed]
    if not all(isinstance(function, dict) for function in functions):
        what = f"{where} has a function_call that is not a JSON object: {shown(call)}"
        raise UserError(what, fix='write {"name": "...", "arguments": {...}}')
    return [{"type": "function", "function": function} for function in functions]


def _check_parts(parts: list[Any], where: str) -> None:
    """Raise UserError if a part of a message's content is neither text nor, as in Mistral's format,
    reasoning."""
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "thinking") or not isinstance(part.get(kind), str):
            what = f"{where} has a part that is not text: {shown(part)}"
            raise UserError(what, "only text is supported", "remove such records")


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


def _is_empty(value: Any) -> bool:
    return value is None or value in ("", [], {})


def _described(value: Any) -> str:
    return f"{shown(value)} (type {type(value).__name__})"


def _parse(value: Any) -> Any:
    """Parse a list, object or null that a table stores as a JSON string. Return any other value
    unchanged."""
    if value == "null":
        return None
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return from_json(value)
        except ValueError:
            return value
    return value
