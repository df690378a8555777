"""Records in the shapes people have: which shape, and what is trained on in each of them."""

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
    "chat_template_kwargs",  # TRL's
)  # fmt: skip
_EXAMPLES = {
    TEXT: '{"text": "..."}',
    PROMPT: '{"prompt": "...", "completion": "..."}',
    MESSAGES: '{"messages": [{"role": "user", "content": "..."}, '
    '{"role": "assistant", "content": "..."}]}',
}
# Columns of a question and its answer, in the order in which they are looked for.
_PAIRS = (
    (PROMPT, "completion"), (PROMPT, "response"), ("question", "answer"),
    ("instruction", "output"), ("instruction", "response"),
)  # fmt: skip
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys((ASSISTANT, "gpt", "model", "bot", "chatgpt"), ASSISTANT),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    **dict.fromkeys(("system", "developer", "function", "ipython", "documents"), ""),
    "function_call": ASSISTANT,
}
# Keys by which datasets say whether a message is in the loss: OpenAI's, axolotl's two, verl's two,
# and ms-swift's.
_MARKS = ("weight", "train", "training", "trainable", "loss_mask", "loss")
_NOT_ANSWERS = "messages are marked to be trained on, but only answers are"
Why = Counter[str]  # how many records, by what is said about them


def _name_some(columns: Iterable[str]) -> str:
    """Return the first columns of a record, for an error."""
    names = [shown(name) for name in columns]
    more = f" and {len(names) - 20:,} more" if len(names) > 20 else ""
    return ", ".join(names[:20]) + more or "no columns"


class Shape:
    """How the records of a dataset are read: all as the first one. `columns` renames some."""

    def __init__(self, record: Any, where: str, columns: Mapping[str, str]) -> None:
        self.columns = columns
        keys = self._renamed(record) if isinstance(record, dict) else {}
        missing = [theirs for theirs in columns.values() if theirs not in record]
        if missing:
            what = f"columns names {shown(missing[0])}, which {where} has not"
            raise UserError(what, fix=f"it has {_name_some(record)}")
        self.names: tuple[str, ...] = ()
        pair = next((pair for pair in _PAIRS if set(pair) <= keys.keys()), None)
        chat = next((name for name in (MESSAGES, "conversations") if name in keys), None)
        # Beside an answer a text is most often a copy of the record, rendered for another model.
        answers = [keys[name] for name in (*(pair or ())[1:], chat) if name]
        self.has_copy = TEXT in keys and any(answers) and TEXT not in columns
        if TEXT in keys and not self.has_copy:
            self.form, self.names = TEXT, (TEXT,)
        # Datasets of chats often repeat the first question as "prompt".
        elif pair and (MESSAGES not in keys or pair[1] == "completion"):
            self.form, self.names = PROMPT, pair
            is_chat = isinstance(keys[pair[0]], list) or isinstance(keys[pair[1]], list)
            if is_chat or pair[0] == "instruction":
                self.form = MESSAGES
        elif chat:
            self.form, self.names = MESSAGES, (chat,)
        else:
            column = "completion" if PROMPT in keys else TEXT
            fix = f"give {' or '.join(_EXAMPLES.values())}, or name yours with --columns "
            raise UserError(
                f'{where} has no "{column}" string',
                f"it has {_name_some(keys)}",
                f"{fix}prompt=...,completion=...",
            )

    def _renamed(self, record: Mapping[str, Any]) -> dict[str, Any]:
        if not self.columns:
            return dict(record)
        taken = {ours: record.get(theirs) for ours, theirs in self.columns.items()}
        rest = {key: value for key, value in record.items() if key not in self.columns.values()}
        return {**rest, **taken}

    def text(self, record: Any, where: str) -> str:
        """The text of a record that is one."""
        (text,) = self._strings(record, where)
        return text

    def pair(self, record: Any, where: str) -> tuple[str, str]:
        """(prompt, completion) of a record that is a pair of texts."""
        prompt, completion = self._strings(record, where)
        return prompt, completion

    def conversation(
        self, record: Any, where: str, notes: Why, *, drop_nulls: bool = False
    ) -> Conversation:
        """The conversation of a record, a pair of texts too. Counts unknown roles in `notes`;
        `drop_nulls`: leave out members that are null, as Arrow adds them."""
        keys = self._checked(record, where)
        if drop_nulls:
            keys = _without_nulls(keys)
        skip: list[int] = []
        if len(self.names) == 1:
            given = _parsed(keys.get(self.names[0]))
            if given is None:
                given = []
            messages = self._messages(given, where, notes)
        elif self.names[0] == "instruction":
            messages = self._instruction(keys, where)
        else:
            asked, answered = (keys.get(name) for name in self.names)
            if not isinstance(asked, list):
                asked = self._check(asked, self.names[0], where)
                asked = [{"role": "user", "content": asked}]
            if not isinstance(answered, list):
                self._check(answered or "", self.names[1], where)
                answered = [{"role": ASSISTANT, "content": answered}] if answered else []
            messages = self._messages(asked, where, notes)
            skip = list(range(len(messages)))
            messages += self._messages(answered, where, notes)
        system = keys.get("system")
        if isinstance(system, str) and system and (not messages or messages[0]["role"] != "system"):
            messages = [{"role": "system", "content": system}, *messages]
            skip = [0, *(place + 1 for place in skip)]
        for place, message in enumerate(messages):
            is_trained = _is_trained(message, f"{where}: message {place + 1}")
            if is_trained is False:
                skip.append(place)
            elif is_trained and message["role"] != ASSISTANT:
                notes[_NOT_ANSWERS] += 1
        values = _parsed(keys.get("chat_template_kwargs")) or {}
        tools, documents = (
            self._check(_parsed(keys.get(name)) or None, name, where, list, optional=True)
            for name in ("tools", "documents")
        )
        return Conversation(messages, tools, documents, values, skip)

    def _instruction(self, keys: Mapping[str, Any], where: str) -> list[Message]:
        """Alpaca's: an instruction, perhaps an input for it, the answer, perhaps earlier pairs."""
        turns = list(keys.get("history") or [])
        asked = self._check(keys.get("instruction"), "instruction", where)
        if given := keys.get("input"):
            asked = f"{asked}\n{self._check(given, 'input', where)}"
        turns.append((asked, keys.get(self.names[1])))
        messages = list[Message]()
        for question, answer in turns:
            messages.append({"role": "user", "content": question})
            if answer:
                answer = self._check(answer, self.names[1], where)
                messages.append({"role": ASSISTANT, "content": answer})
        return messages

    def _messages(self, given: Any, where: str, notes: Why) -> list[Message]:
        self._check(given, self.names[0], where, list)
        return [_message(message, f"{where}: a message", notes) for message in given]

    def _strings(self, record: Any, where: str) -> list[str]:
        keys = self._checked(record, where)
        missing = [name for name in self.names if name not in keys]
        if missing:
            self._check(None, missing[0], where)
        last = self.names[-1]  # null as well as empty
        keys[last] = keys[last] or ""
        return [self._check(keys[name], name, where) for name in self.names]

    def _checked(self, record: Any, where: str) -> dict[str, Any]:
        if not isinstance(record, dict):
            self._check(None, self.names[0], where)
        return self._renamed(record)

    def _check(
        self, value: Any, name: str, where: str, kind: type = str, *, optional: bool = False
    ) -> Any:
        if not isinstance(value, kind) and not (optional and value is None):
            word = "string" if kind is str else "list"
            raise UserError(f'{where} has no "{name}" {word}', fix=_EXAMPLES[self.form])
        return value


def _message(given: Any, where: str, notes: Why) -> Message:
    """A message with role and content, whatever its keys are called; all others stay."""

    def refuse(key: str) -> NoReturn:
        raise UserError(f'{where} has no "{key}" string', fix=_EXAMPLES[MESSAGES])

    if not isinstance(given, dict):
        refuse("role")
    message = dict(given)
    if "role" not in message and "from" in message:
        message["role"] = message.pop("from")
    if "content" not in message and "value" in message:
        message["content"] = message.pop("value")
    role = message.get("role")
    if not isinstance(role, str):
        refuse("role")
    message["role"] = _ROLES.get(role) or role
    if role not in _ROLES:
        notes[f"messages of the unknown role {shown(role)}"] += 1
    content = message.get("content")
    if role == "function_call" and isinstance(content, str):
        called = _parsed(content)
        calls = called if isinstance(called, list) else [called]
        if not all(isinstance(call, dict) for call in calls):
            raise UserError(f"{where} is a function_call, but no JSON object", shown(content))
        message |= {
            "content": "",
            "tool_calls": [{"type": "function", "function": c} for c in calls],
        }
    elif isinstance(content, list):
        others = [part for part in content if not _is_text(part)]
        if others:
            what = f"{where} has a part that is no text"
            raise UserError(
                what, shown(others[0]), "leave out such rows: this suite trains on text"
            )
    elif content is None:
        if "content" not in message and not message.get("tool_calls"):
            refuse("content")
        message["content"] = ""
    elif not isinstance(content, str):
        refuse("content")
    return message


def _is_trained(message: Message, where: str) -> bool | None:
    """Return whether a dataset marks a message as trained on; None if it has no mark."""
    values = {key: message[key] for key in _MARKS if message.get(key) is not None}
    unclear = [key for key, value in values.items() if value not in (0, 1)]  # True is 1
    if message.get("train_detail"):  # axolotl's, for parts of a message
        unclear.append("train_detail")
    if unclear:
        what = f"{where} has {shown(unclear[0])} {shown(message[unclear[0]])}"
        raise UserError(what, "a message is in the loss or not", "give 0 or 1, or remove it")
    return all(values.values()) if values else None


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part["text"], str)


def _parsed(value: Any) -> Any:
    """A list or an object that a table keeps as JSON; anything else as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        kept = ((key, member) for key, member in value.items() if member is not None)
        return {key: _without_nulls(member) for key, member in kept}
    if isinstance(value, list):
        return [_without_nulls(member) for member in value]
    return value
