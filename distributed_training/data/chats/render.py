"""Render a tokenizer's own chat template with transformers.

The Jinja sandbox of transformers keeps a template from running code. Time and memory are not
limited, so an endless template must be stopped with Ctrl-C."""

import inspect
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from distributed_training.data.chats.align import (
    AlignmentError,
    Rendered,
    align,
    join_parts,
    try_render,
)
from distributed_training.data.chats.marks import find_functions, put_marks
from distributed_training.data.pieces import ASSISTANT, Message, Span
from distributed_training.settings.config import today
from distributed_training.settings.errors import UserError, describe
from distributed_training.settings.files import shown


class Conversation(NamedTuple):
    """Arguments of a chat template, and the messages that are not in the loss."""

    messages: list[Message]
    tools: list[Any] | None = None
    template_kwargs: dict[str, Any] = {}  # noqa: RUF012, other variables of the template
    skip: list[int] = []  # noqa: RUF012, indices of messages that are not in the loss

    @property
    def called_functions(self) -> list[dict[str, Any]]:
        """Functions in the tool calls of all messages."""
        calls = (message.get("tool_calls") or [] for message in self.messages)
        return find_functions(itertools.chain(*calls))


@dataclass(frozen=True)
class Renderer:
    """Chat template of a tokenizer."""

    templates: Sequence[str]  # one for conversations without tools, and one for those with tools
    variables: dict[str, Any]  # variables that both templates can use
    special_pattern: re.Pattern[str]  # matches special tokens
    date: str = field(default_factory=today)  # today's date for the templates, in ISO format

    @cached_property
    def words(self) -> set[str]:
        """Names and strings in the templates' code. They include every key of a message that a
        template reads."""
        from jinja2 import Environment

        tokens = Environment().lex("\n".join(self.templates))
        return {text.strip("'\"") for _, kind, text in tokens if kind in ("name", "string")}

    def render_samples(self, conversation: Conversation, where: str) -> list[Rendered]:
        """Return the samples of a conversation. Raises UserError with its location in the dataset,
        `where`, if the template cannot render it."""
        _check_kwargs(conversation.template_kwargs, where)
        try:
            conversation = self._adapt(conversation)
            return align(
                partial(self._render, conversation),
                conversation.messages,
                is_marked=self._marks_answers(conversation),
                special_pattern=self.special_pattern,
                skip=conversation.skip,
            )
        except Exception as error:  # A template can raise any error.
            what = f"{where} cannot be rendered by the chat template"
            why = str(error) if isinstance(error, AlignmentError) else describe(error)
            fix = "change the record or the chat template"
            arguments = [function.get("arguments") for function in conversation.called_functions]
            if any(isinstance(value, str) for value in arguments):
                fix = f"write the arguments as an object instead of a string, or {fix}"
            raise UserError(what, why, fix) from None

    def find_omitted(self, conversation: Conversation) -> list[str]:
        """Return message, call or tool for each part of a conversation that the template omits."""
        conversation = self._adapt(conversation)
        messages, tools, marks = put_marks(conversation.messages, conversation.tools)
        render = partial(self._render, conversation._replace(tools=tools))
        ends = [len(messages)]
        if not self._marks_answers(conversation):
            # An answer that the template shortens if another one follows has its own sample.
            ends += [i for i, message in enumerate(messages, 1) if message["role"] == ASSISTANT]
        text = ""
        for end in ends:
            text += try_render(render, messages[:end])
            omitted = [kind for name, (kind, _) in marks.items() if name not in text]
            if not omitted:
                break
        return omitted

    def render_prompt(self, messages: list[Message]) -> str:
        """Return the text of a conversation, whose contents are strings, up to the start of the
        answer to its last message. Raises UserError if the template cannot render the
        conversation."""
        try:
            return self._render(Conversation([]), messages, add_generation_prompt=True)[0]
        except Exception as error:  # A template can raise any error.
            what = "the chat template cannot render this question"
            raise UserError(what, describe(error)) from None

    def _adapt(self, conversation: Conversation) -> Conversation:
        """Join the parts of contents that are lists if the template accepts only strings."""
        contents = [message.get("content") for message in conversation.messages]
        has_parts = any(isinstance(content, list) for content in contents)
        if has_parts and not self._accepts_parts:
            return conversation._replace(messages=join_parts(conversation.messages))
        return conversation

    @cached_property
    def _accepts_parts(self) -> bool:
        """Whether the template accepts messages whose content is a list of parts."""
        parts = [{"type": "text", "text": "Z"}, {"type": "text", "text": "X"}]
        probe = {"role": "user", "content": parts}
        try:
            text = self._render(Conversation([]), [probe])[0]
        except Exception:  # for example, the template adds a string to a list
            return False
        return re.search(r"Z\s*X", text) is not None

    def _render(
        self, conversation: Conversation, messages: Sequence[Message], **options: Any
    ) -> tuple[str, list[Span]]:
        """Return the text of `messages`, and the spans that the template marks if `options` ask for
        them."""
        from transformers.utils import chat_template_utils

        # The templates' function strftime_now calls datetime.now, and transformers lets no other
        # function into a template.
        now = datetime.fromisoformat(self.date)
        vars(chat_template_utils)["datetime"] = SimpleNamespace(now=lambda: now)
        rendered: Any = chat_template_utils.render_jinja_template(
            conversations=[list(messages)],
            tools=conversation.tools,
            chat_template=self._select_template(conversation),
            **{**self.variables, **conversation.template_kwargs},
            **options,
        )
        texts, spans = rendered
        return texts[0], spans[0] if spans else []

    def _marks_answers(self, conversation: Conversation) -> bool:
        """Return whether the template marks the text that the assistant generates."""
        template = self._select_template(conversation)
        return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None

    def _select_template(self, conversation: Conversation) -> str:
        without_tools, with_tools = self.templates
        return with_tools if conversation.tools else without_tools


def _check_kwargs(template_kwargs: dict[str, Any], where: str) -> None:
    """Raise UserError if a variable of the template has the name of a parameter of transformers,
    which would replace messages or tools, or move the end of the text."""
    from transformers import PreTrainedTokenizerBase

    for name in template_kwargs:
        parameters = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
        if name in {*parameters, "messages", "conversations"}:
            what = f"{where}: chat_template_kwargs sets {shown(name)}"
            why = "it may set only variables of the chat template"
            raise UserError(what, why, "remove it")
