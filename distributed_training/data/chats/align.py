"""What a chat template makes of a conversation, and which characters of it are answers. This runs
in the process of data/chats/render.py, where a template may fail, hang or eat memory."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from distributed_training.data.pieces import ASSISTANT, Message, Span
from distributed_training.settings.errors import UserError

Render = Callable[..., str]  # (messages, ask=bool) -> text
_THOUGHT = re.compile(r"<think>(.*?)</think>", re.S)
_STAND_IN = "qzWzqXy"  # for a content whose place in the text is looked for


class AlignmentError(ValueError):
    """A template whose answers cannot be found in its text."""


class Rendered(NamedTuple):
    """A sample: a text, which of it is in the loss, and what deserves a note."""

    text: str
    spans: list[Span]
    thoughts_removed: int = 0  # answers whose thoughts the template leaves out
    unended: int = 0  # answers after which the template puts no special token


class _Answer(NamedTuple):
    text: str  # the conversation up to this answer, as the model sees it when it answers
    start: int
    end: int  # of the answer and of what ends it, whatever follows
    is_prefix: bool  # whether the text is the template's own for the conversation so far


def align(
    render: Render,
    messages: Sequence[Message],
    *,
    skip: Sequence[int] = (),
    marked: Sequence[Span] | None = None,
    marks: re.Pattern[str],
) -> list[Rendered]:
    """The samples of a conversation. All answers are in one if the template writes each as it does
    when the model is asked for it; an answer of which that is not true has a sample of its own.
    `skip`: messages that are not trained on; `marked`: characters between the template's
    generation marks, if it has any; `marks` matches special tokens. Raises AlignmentError."""
    answers = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
    trained = [i for i in answers if i not in skip]
    if not trained:
        return []
    whole = render(messages)
    if marked is not None:
        spans = list(marked)
        for place in set(answers).intersection(skip):
            answer = _find(render, messages, place, marks)
            spans = [span for span in spans if not answer.start <= span[0] < len(answer.text)]
        inside = "".join(whole[first:last] for first, last in spans)
        removed = sum(_is_removed(messages[place], inside) for place in trained)
        return [Rendered(whole, spans, removed)] if spans else []
    together = list[Span]()
    apart = list[Rendered]()
    removed = 0
    unended = 0
    for place in trained:
        text, start, end, is_prefix = _find(render, messages, place, marks)
        if start == len(text) and messages[place].get("content"):
            raise AlignmentError(f"the template leaves out message {place + 1}, an answer")
        if is_prefix and whole.startswith(text):
            end = len(text)
        elif not (is_prefix and start < end and whole.startswith(text[:end])):
            lost = int(_is_removed(messages[place], text[start:]))
            unended_here = int(not marks.search(text, start))
            apart.append(Rendered(text, [(start, len(text))], lost, unended_here))
            continue
        together.append((start, end))
        removed += _is_removed(messages[place], whole[start:end])
        unended += not marks.search(text, start)
    if together:
        return [Rendered(whole, together, removed, unended), *apart]
    return apart


def _find(
    render: Render, messages: Sequence[Message], place: int, marks: re.Pattern[str]
) -> _Answer:
    """Find the answer at `place` in the conversation up to it."""
    before = list(messages[:place])
    answer = messages[place]
    text = render([*before, answer])
    stand_in = _STAND_IN
    while stand_in in text:
        stand_in += "q"
    # With another content the template's own words around an answer show.
    probe = _try(render, [*before, {"role": ASSISTANT, "content": stand_in}])
    header, found, tail = probe.partition(stand_in)
    if not found or not text.startswith(header):
        header = tail = ""
    end = len(text)
    if tail and text.endswith(tail):
        end -= len(tail)
        mark = marks.search(tail)
        end = end + mark.end() if mark else 0
    elif not tail:
        end = 0
    question = _try(render, before, ask=True)
    if question and text.startswith(question):
        start = len(question)
        content = answer.get("content")
        inside = text[len(header) : start]
        if header and inside and isinstance(content, str) and content.startswith(inside):
            start = len(header)  # the answer begins as the question ends
        return _Answer(text, start, end, is_prefix=True)
    if header and question and before:
        # When it is asked, the model sees another question than is shown beside its answer.
        earlier = [*before[:-1], {**before[-1], "content": stand_in}]
        asked = _try(render, earlier, ask=True).partition(stand_in)[2]
        reply = {"role": ASSISTANT, "content": stand_in}
        between = _try(render, [*earlier, reply]).split(stand_in)
        if asked and len(between) == 3 and between[1].startswith(asked):
            own = between[1][len(asked) :] + text[len(header) :]
            return _Answer(question + own, len(question), 0, is_prefix=False)
    if not header:
        role = f"message {place + 1}, an answer,"
        raise AlignmentError(f"{role} is not where the template puts the answer it asks for")
    return _Answer(text, len(header), end, is_prefix=True)


def _try(render: Render, messages: Sequence[Message], **options: Any) -> str:
    """The text, or none if the template refuses these messages."""
    try:
        return render(messages, **options)
    except MemoryError:
        raise
    except Exception:  # whatever a template raises: it need not know such a conversation
        return ""


def _is_removed(message: Mapping[str, Any], text: str) -> bool:
    thoughts = [message.get(key) for key in ("reasoning_content", "thinking", "reasoning")]
    content = message.get("content")
    if isinstance(content, str):
        thoughts += _THOUGHT.findall(content)
    said = (thought.strip() for thought in thoughts if isinstance(thought, str))
    return any(thought and thought not in text for thought in said)


def own_spans(conversation: Any, eos: str, where: str) -> list[Rendered]:
    """The sample of a conversation in our own template, assets/chat/chat_template.jinja:

    user: What is 2 + 2?
    assistant: 4<|endoftext|>user: And 3 + 3?
    assistant: 6<|endoftext|>
    """
    if conversation.tools or any(message.get("tool_calls") for message in conversation.messages):
        what = f"{where} has tool calls, and the tokenizer has no chat template"
        fix = "take the tokenizer of a model that was trained for chats, or remove such rows"
        raise UserError(what, "ours has no place for tools", fix)
    text = ""
    spans = []
    for place, message in enumerate(joined(conversation.messages)):
        if message["role"] == ASSISTANT:
            text += f"{ASSISTANT}:"
            start = len(text)
            text += f" {message['content']}{eos}"
            if place not in conversation.skip:
                spans.append((start, len(text)))
        else:
            text += f"{message['role']}: {message['content']}\n"
    return [Rendered(text, spans)] if spans else []


def joined(messages: Sequence[Message]) -> list[Message]:
    """Messages whose text is one string each, not parts."""
    found = []
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            message = {**message, "content": "".join(part["text"] for part in content)}
        found.append(message)
    return found
