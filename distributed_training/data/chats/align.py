"""Render a conversation with a chat template and find the characters that belong to answers."""

import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from distributed_training.data.chats.marks import put_marks
from distributed_training.data.pieces import ASSISTANT, Message, Span

# Messages and options of transformers -> text, and the spans that the template marks
Render = Callable[..., tuple[str, list[Span]]]
_THOUGHT = re.compile(r"<think>(.*?)</think>", re.S)
# Block of reasoning with which a prompt asks for an answer without reasoning
_EMPTY_THOUGHT = re.compile(r"(<[^<>\s]*(think[^<>\s]*>|channel[^<>\s]*>(thought)?)\s*)+\Z", re.I)
_TAG = re.compile(r"<[^<>]+>|\[[^\[\]]+\]")
_PLACEHOLDER = "qzWzqXyVvJ"  # replaces an answer to find its position in the text


class AlignmentError(ValueError):
    """Raised if an answer cannot be found in the text that a template renders."""


class Rendered(NamedTuple):
    """Sample rendered from a conversation: its text, and the spans of the text that are in the
    loss."""

    text: str
    spans: list[Span]
    num_without_end_token: int  # answers that the template ends without a special token
    # (text before the last answer of the conversation, text with which generation asks for it),
    # both after the question, if they differ
    unasked: tuple[str, str] | None = None


class _Answer(NamedTuple):
    text: str  # the conversation up to and including this answer
    start: int  # index of the answer's first character
    end: int  # index after the answer and its end token; 0 if unknown
    stop: str = ""  # special token of the next turn, if only this token ends the answer


def align(
    render: Render,
    messages: Sequence[Message],
    *,
    skip: Sequence[int],
    is_marked: bool,
    special_pattern: re.Pattern[str],
) -> list[Rendered]:
    """Return the samples of a conversation.

    The template may render an answer differently in the whole conversation than during generation.
    Each such answer gets a separate sample, and all other answers share the first sample.

    If the template marks the text to train on (`is_marked`), the result is instead one sample with
    the marked spans that belong to no skipped message, or no sample if there are no such spans.
    `skip` contains the indices of messages that are not in the loss. The pattern `special_pattern`
    matches special tokens.

    Some templates, such as GLM-4's, put no special token after an answer. The special token that
    begins the next turn is then in the loss, because the model must generate it to stop. This token
    is also added after the last answer.

    Raises AlignmentError if an answer cannot be found."""
    trained_indices = [
        index
        for index, message in enumerate(messages)
        if message["role"] == ASSISTANT and index not in skip
    ]
    if not trained_indices:
        return []
    if not is_marked:
        samples = _align_answers(render, messages, trained_indices, special_pattern)
    else:
        text, spans = render(messages, return_assistant_tokens_mask=True)
        if skip:
            owners = _find_owners(render, messages)
            spans = [span for span, i in zip(spans, owners, strict=True) if i not in skip]
        spans = [(first, last) for first, last in spans if first < last]
        # An answer may have several marked spans. The last one must contain the end token.
        num_without_end_token = 0
        length = len(text)
        for (first, last), (following, _) in itertools.pairwise([*spans, (length, length)]):
            ends = following == length or special_pattern.search(text, last, following)
            if ends and not special_pattern.search(text, first, last):
                num_without_end_token += 1
        samples = [Rendered(text, spans, num_without_end_token)] if spans else []
    if samples:
        unasked = _find_unasked(render, messages[: trained_indices[-1] + 1], samples)
        samples[0] = samples[0]._replace(unasked=unasked)
    return samples


def _align_answers(
    render: Render,
    messages: Sequence[Message],
    trained_indices: Sequence[int],
    special_pattern: re.Pattern[str],
) -> list[Rendered]:
    full_text, _ = render(messages)
    shared_spans = list[Span]()
    separate_samples = list[Rendered]()
    num_without_end_token = 0
    for index in trained_indices:
        text, start, end, stop = _find_answer(render, messages, index, special_pattern)
        if start == len(text) and messages[index].get("content"):
            raise AlignmentError(f"the template omits message {index + 1}, which is an answer")
        is_silent = special_pattern.sub("", text[start:]).strip() == ""
        if is_silent and (messages[index].get("tool_calls") or start == len(text + stop)):
            continue  # The template omits the calls or the answer. Silence is not an answer.
        lacks_end_token = 0 if stop or special_pattern.search(text, start) else 1
        if full_text.startswith(text):
            end = len(text)
        elif start < end and full_text.startswith(text[:end]):
            # White space after the end token belongs to the answer, as at the end of the text.
            end = len(full_text) - len(full_text[end:].lstrip())
        else:
            text += stop
            separate_samples.append(Rendered(text, [(start, len(text))], lacks_end_token))
            continue
        if stop:
            if end == len(full_text):
                full_text += stop
            next_mark = special_pattern.match(full_text, end)
            end = next_mark.end() if next_mark else end
        shared_spans.append((start, end))
        num_without_end_token += lacks_end_token
    if shared_spans:
        return [Rendered(full_text, shared_spans, num_without_end_token), *separate_samples]
    return separate_samples


def _find_owners(render: Render, messages: Sequence[Message]) -> list[int]:
    """Return the index of the answer to which each span belongs that the template marks."""
    marked_messages, _, marks = put_marks([*messages])
    text, spans = render(marked_messages, return_assistant_tokens_mask=True)
    positions = sorted((text.find(name), index) for name, (_, index) in marks.items())
    answers = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
    owners = []
    for first, _ in spans:
        following = next((i for position, i in positions if position >= first), len(messages))
        owners.append(max((i for i in answers if i <= following), default=-1))
    return owners


def _find_answer(
    render: Render, messages: Sequence[Message], index: int, special_pattern: re.Pattern[str]
) -> _Answer:
    """Render the conversation up to and including the answer `messages[index]`, and locate this
    answer in the rendered text. Raises AlignmentError if the answer cannot be found."""
    earlier_messages = list(messages[:index])
    answer = messages[index]
    text, _ = render([*earlier_messages, answer])
    # Render other content in place of the answer to find the text that the template puts around an
    # answer.
    reply = {"role": ASSISTANT, "content": _PLACEHOLDER}
    probe = try_render(render, [*earlier_messages, reply])
    header, separator, tail = probe.partition(_PLACEHOLDER)
    stop = ""
    if separator and not special_pattern.search(tail):
        role = "tool" if answer.get("tool_calls") else "user"
        next_turn = {"role": role, "content": "?"}
        with_next_turn = try_render(render, [*earlier_messages, reply, next_turn])
        following = with_next_turn.partition(_PLACEHOLDER)[2]
        next_mark = special_pattern.match(following, len(tail))
        if following.startswith(tail) and next_mark:
            stop = next_mark.group()
    if not separator or not text.startswith(header):
        header = tail = ""
    end = len(text)
    if tail and text.endswith(tail):
        end -= len(tail)
        mark = special_pattern.search(tail)
        end = end + mark.end() if mark else 0
    elif not tail:
        end = 0
    prompt = try_render(render, earlier_messages, ask=True)
    if prompt and text.startswith(prompt):
        start = len(prompt)
        content = answer.get("content")
        overlap = text[len(header) : start]
        if header and overlap and isinstance(content, str) and content.startswith(overlap):
            start = len(header)  # The answer begins with the end of the question.
        return _Answer(text, start, end, stop)
    if prompt:
        # The template renders a question without an answer differently from a question with one.
        asked, told, plain = _render_after_question(render, messages[: index + 1])
        if told.startswith(asked):
            return _Answer(prompt + told.removeprefix(asked), len(prompt), 0, stop)
        # Only the prompt has an empty block of reasoning. One that the prompt merely begins would
        # contain the answer.
        common = _common_start(asked, plain)
        is_block = len(_TAG.findall(asked[len(common) :] + plain[len(common) :])) != 1
        if plain and told.startswith(plain) and is_block:
            return _Answer(prompt + told.removeprefix(common), len(prompt), 0, stop)
        thought = _EMPTY_THOUGHT.search(asked)
        if not header and thought and told.startswith(asked[: thought.start()]):
            # The answer has reasoning. As in TRL's templates for training, it begins with its own
            # block.
            return _Answer(text, len(text) - len(told) + thought.start(), 0, stop)
    if header:
        return _Answer(text, len(header), end, stop)
    if not answer.get("content"):
        return _Answer(text, len(text), 0)  # The template omits empty answers.
    which = f"message {index + 1}, an answer,"
    raise AlignmentError(f"{which} is not at the position where the template puts answers")


def _render_after_question(render: Render, messages: Sequence[Message]) -> tuple[str, str, str]:
    """Return what the template writes after the last question, which precedes the last message: to
    ask for an answer; with this answer; and before the content of an answer without reasoning. If
    the question cannot be found, these are the whole texts."""
    *before, answer = messages
    if before:
        before[-1] = {**before[-1], "content": _PLACEHOLDER}
    reply = {"role": ASSISTANT, "content": _PLACEHOLDER}
    texts = (
        try_render(render, before, ask=True),
        try_render(render, [*before, answer]),
        try_render(render, [*before, reply]).rpartition(_PLACEHOLDER)[0],
    )
    asked, told, plain = (text.rpartition(_PLACEHOLDER)[2] for text in texts)
    return asked, told, plain


def _find_unasked(
    render: Render, messages: Sequence[Message], samples: Sequence[Rendered]
) -> tuple[str, str] | None:
    """Return the text that precedes the last of `messages`, an answer, and the text with which
    generation asks for it, both after the question, if no sample continues the prompt."""
    prompt = try_render(render, messages[:-1], ask=True)
    if any(sample.text.startswith(prompt) for sample in samples):
        return None
    asked, told, _ = _render_after_question(render, messages)
    return None if told.startswith(asked) else (_common_start(asked, told), asked)


def _common_start(one: str, other: str) -> str:
    """Return the text with which both begin, without an incomplete tag at its end."""
    start = os.path.commonprefix([one, other])  # noqa: RUF071, these are no paths
    return re.sub(r"[<\[][^<>\[\]]*\Z", "", start)


def try_render(render: Render, messages: Sequence[Message], *, ask: bool = False) -> str:
    """Return the rendered `messages`, followed by the prompt for an answer if `ask` is set. Return
    "" if the template cannot render them."""
    try:
        return render(messages, add_generation_prompt=ask)[0]
    except Exception:  # A template can raise any error for unexpected messages.
        return ""


def loses_thoughts(message: Mapping[str, Any], text: str) -> bool:
    """Return whether a message has reasoning that is missing from `text`, which is in the loss."""
    thoughts = [message.get(key) for key in ("reasoning_content", "thinking", "reasoning")]
    content = message.get("content")
    if isinstance(content, str):
        thoughts += _THOUGHT.findall(content)
    elif content:
        thoughts += [part.get("thinking") for part in content]
    return any(isinstance(thought, str) and thought.strip() not in text for thought in thoughts)


def join_parts(messages: Sequence[Message]) -> list[Message]:
    """Return `messages`, with the text in each list of content parts joined into one string."""
    with_texts = []
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            message = {**message, "content": "".join(part.get("text") or "" for part in content)}
        with_texts.append(message)
    return with_texts
