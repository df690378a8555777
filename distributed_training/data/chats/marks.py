"""Put unique marks into a conversation. By rendering them, one sees what a template writes, and
where."""

import copy
import re
from collections.abc import Iterable
from typing import Any

from distributed_training.data.pieces import Message

Marks = dict[str, tuple[str, int]]  # mark -> (message, call or tool; index of its message or -1)


def put_marks(
    messages: list[Message], tools: list[Any] | None = None
) -> tuple[list[Message], list[Any] | None, Marks]:
    """Return copies of messages and tools with marks in contents that are not blank, and instead of
    the names of tools and calls."""
    messages, tools = copy.deepcopy((messages, tools))
    marks: Marks = {}

    def new_mark(kind: str, index: int) -> str:
        text = f"qzWzqX{len(marks)}yVvJ"
        marks[text] = kind, index
        return text

    for index, message in enumerate(messages):
        content = message["content"]
        for part in content if isinstance(content, list) else [message]:
            for key in part.keys() & {"text", "content"}:
                if (part[key] or "").strip():
                    # Text at the start may be reasoning, which has a note of its own.
                    name = new_mark("message", index)
                    part[key] = re.sub(r"(?=\S\s*\Z)", name, part[key])
        for function in find_functions(message.get("tool_calls") or []):
            function["name"] = new_mark("call", index)
    for function in find_functions(tools or []):
        function["name"] = new_mark("tool", -1)
    return messages, tools, marks


def find_functions(items: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the functions in a list of tools or tool calls."""
    functions = (item.get("function", item) for item in items if isinstance(item, dict))
    return [function for function in functions if isinstance(function, dict)]
