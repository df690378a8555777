"""Recognize the form of each record, and decide which part of it is in the loss."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

from distributed_training.data.chats.render import Conversation
from distributed_training.data.pieces import ASSISTANT, MESSAGES, PROMPT, TEXT, Message
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import parse_json, shown

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
_OUTPUT_KEYS = ("tool_calls", "reasoning_content", "reasoning", "thinking")
# Keys of a message that this package reads, or for which it has other notes
READ_KEYS = {"role", "content", "function_call", "train_detail", *_TRAIN_KEYS, *_OUTPUT_KEYS}
_IGNORED_MARKS = (
    "message with a training mark that is ignored, because only answers are in the loss"
)
_TWO_SYSTEMS = (
    "record with a system column that is not read, because the messages already begin with a "
    "system message"
)
# Columns that only a chat template can render
_CONTEXT_COLUMNS = {"system", "history", "tools", "documents"}
_TYPE_NAMES: dict[type, str] = {str: "string", list: "list", dict: "JSON object"}
Notes = Counter[str]  # number of records or messages, by note


class Record:
    """One record of a dataset: its form, and the columns that are read.

    `columns` maps column names that this module knows to the corresponding names in the dataset.
    `where` is the record's location for error messages. Columns whose value is null or empty count
    as missing if another form has values. Raises UserError if the record has no known form."""

    def __init__(self, raw: Any, where: str, columns: Mapping[str, str]) -> None:
        if not isinstance(raw, dict):
            raise UserError(f"{where} is not a JSON object", fix=f"write {_EXAMPLES[TEXT]}")
        renamed = {name: raw[theirs] for name, theirs in columns.items() if theirs in raw}
        hidden = {*columns, *columns.values()}
        others = {name: value for name, value in raw.items() if name not in hidden}
        self.fields = fields = {**others, **renamed}
        self.where = where
        self._raw = raw
        self._columns = columns

        def is_given(name: str) -> bool:
            return not _is_empty(fields.get(name))

        pairs = [pair for pair in _COLUMN_PAIRS if set(pair) <= fields.keys()]
        pair = max(pairs, key=lambda pair: (is_given(pair[1]), is_given(pair[0])), default=())
        has_pair = any(map(is_given, pair))
        chats = [name for name in (MESSAGES, "conversations") if name in fields]
        chat = max(chats, key=is_given, default="")
        # Conversation datasets often repeat the first question as "prompt".
        is_complete = "completion" in pair and is_given("completion")
        prefers_chat = is_given(MESSAGES) and not is_complete
        self.form = MESSAGES
        if TEXT in fields and (TEXT in columns or not (has_pair or is_given(chat))):
            self.form = TEXT
            self.names: tuple[str, ...] = (TEXT,)
        elif pair and not prefers_chat and (has_pair or not chat):
            self.names = pair
            has_messages = any(isinstance(fields[name], list) for name in pair)
            if not (has_messages or pair[0] == "instruction" or fields.keys() & _CONTEXT_COLUMNS):
                self.form = PROMPT
        elif chat:
            self.names = (chat,)
        else:
            column = "completion" if PROMPT in fields else TEXT
            fix = f"write {' or '.join(_EXAMPLES.values())}, or name your columns with --columns "
            fix += "prompt=QUESTION,completion=ANSWER"
            what = f'{where} has no "{columns.get(column, column)}" string'
            raise UserError(what, f"it has {shown(list(raw))}", fix)
        # A text beside an answer is usually a copy of the record that was rendered for another
        # model.
        self.has_copy = self.form != TEXT and fields.get(TEXT) is not None
        # Names of the columns that have been read or, like a copy, have a separate note
        self._used = {TEXT} if self.has_copy else set[str]()

    def find_unread(self) -> list[str]:
        """Return the names of the columns with a value that has not been read."""
        used = {self._columns.get(name, name) for name in self._used}
        return [name for name, value in self._raw.items() if name not in used and value is not None]

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
                messages = self._question_messages()
            if isinstance(answer, list):
                messages += self._read_messages(self.names[1], notes)
            elif answer := self._read(self.names[1]):
                messages.append({"role": ASSISTANT, "content": answer})
        if system := self._read("system"):
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
        return Conversation(messages, tools, self._read("documents", list), template_kwargs, skip)

    def _question_messages(self) -> list[Message]:
        """Return the messages that precede the answer in a record with a question and its answer:
        optional earlier question-answer pairs, then the question. In the Alpaca format, the
        question is an instruction with an optional input."""
        messages = list[Message]()
        for turn in self._read("history", list) or []:
            texts = turn if isinstance(turn, list | tuple) else ()
            if len(texts) != 2 or not all(isinstance(text, str | None) for text in texts):
                what = f"{self.where}: {shown(turn)} in history is not a pair of strings"
                raise UserError(what, fix='write [["question", "answer"], ...]')
            messages.append({"role": "user", "content": texts[0] or ""})
            if texts[1]:
                messages.append({"role": ASSISTANT, "content": texts[1]})
        question = self._read(self.names[0], optional=False)
        if self.names[0] == "instruction" and (context := self._read("input")):
            question = f"{question}\n{context}"
        return [*messages, {"role": "user", "content": question}]

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
            value = None if _is_empty(value := _parse(value)) else value
        if (value is None and optional) or isinstance(value, cls):
            return value
        example = _EXAMPLES[self.form]
        fix = f"write {example}" if name in self.names else f'remove "{name}"'
        name = self._columns.get(name, name)
        if value is None:
            raise UserError(f'{self.where} has no "{name}" {_TYPE_NAMES[cls]}', fix=fix)
        what = f'{self.where}: "{name}" is {_described(value)}, not a {_TYPE_NAMES[cls]}'
        raise UserError(what, fix=fix)


def _read_message(raw: Any, where: str, notes: Notes) -> Message:
    """Return a message with the keys "role" and "content". If the dataset calls these keys "from"
    and "value", they are renamed. Keys whose value is null are left out, because a table cannot
    tell them from missing keys. All other keys are kept. Raises UserError if the content is not
    text or a key has an unsupported value."""

    def refuse(key: str) -> NoReturn:
        why = f"it is {_described(message[key])}" if key in message else ""
        raise UserError(f'{where} has no "{key}" string', why, f"write {_EXAMPLES[MESSAGES]}")

    if not isinstance(raw, dict):
        what = f'{where} is {_described(raw)}, not an object with a "role"'
        raise UserError(what, fix=f"write {_EXAMPLES[MESSAGES]}")
    message = {key: value for key, value in raw.items() if value is not None}
    if "role" not in message and "from" in message:
        message["role"] = message.pop("from")
    if "content" not in message and "value" in message:
        message["content"] = message.pop("value")
    role = message.get("role")
    if not isinstance(role, str):
        refuse("role")
    message["role"] = _ROLES.get(role) or role
    if role not in _ROLES:
        notes[f"message with the unknown role {shown(role)}"] += 1
    if not isinstance(message.get("tool_calls") or [], list):
        what = f"{where} has tool_calls that are not a list: {shown(message['tool_calls'])}"
        raise UserError(what, fix='write [{"type": "function", "function": {...}}, ...]')
    # OpenAI's older format has at most one call in an answer, under another key.
    call = message.get("function_call") if message["role"] == ASSISTANT else None
    if role == "function_call":
        call, message["content"] = message.get("content"), ""
    if not (_is_empty(call) or message.get("tool_calls")):
        parsed = _parse(call)
        calls = parsed if isinstance(parsed, list) else [parsed]
        if not all(isinstance(call, dict) for call in calls):
            what = f"{where} has a function_call that is not a JSON object: {shown(call)}"
            raise UserError(what, fix='write {"name": "...", "arguments": {...}}')
        message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            is_text = isinstance(part, dict) and part.get("type") == "text"
            if not is_text or not isinstance(part.get("text"), str):
                what = f"{where} has a part that is not text: {shown(part)}"
                raise UserError(what, "only text is supported", "remove such records")
    elif content is None:
        if "content" not in raw and "value" not in raw and not message.get("tool_calls"):
            refuse("content")
        message["content"] = ""
        if message["role"] == ASSISTANT and not any(map(message.get, _OUTPUT_KEYS)):
            message["weight"] = 0
            notes["answer with null content, which does not count toward the loss"] += 1
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


def _is_empty(value: Any) -> bool:
    return value is None or value in ("", [], {})


def _described(value: Any) -> str:
    return f"{shown(value)} (type {type(value).__name__})"


def _parse(value: Any) -> Any:
    """Parse a list or object that a table stores as a JSON string. Return any other value
    unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return parse_json(value)
        except ValueError:
            return value
    return value
