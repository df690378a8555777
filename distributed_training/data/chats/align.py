"""Render a conversation with a chat template and find the characters that belong to answers."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from distributed_training.data.pieces import ASSISTANT, Message, Span

Render = Callable[..., str]  # (messages, ask=bool) -> text
_THOUGHT = re.compile(r"<think>(.*?)</think>", re.S)
# Block of reasoning with which a prompt asks for an answer without reasoning
_EMPTY_THOUGHT = re.compile(r"(<[^<>\s]*think[^<>\s]*>\s*)+\Z", re.I)
_PLACEHOLDER = "qzWzqXyVvJ"  # replaces an answer to find its position in the text


class AlignmentError(ValueError):
    """Raised if an answer cannot be found in the text that a template renders."""


class Rendered(NamedTuple):
    """Sample rendered from a conversation: its text, and the spans of the text that are in the
    loss."""

    text: str
    spans: list[Span]
    num_without_end_token: int  # answers that the template ends without a special token


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
    render_marked: Callable[[], Sequence[Span]] | None,
    special_pattern: re.Pattern[str],
) -> list[Rendered]:
    """Return the samples of a conversation.

    The template may render an answer differently in the whole conversation than during generation.
    If `render_marked` is None, each such answer gets a separate sample, and all other answers share
    the first sample.

    If the template marks the text to train on, `render_marked` returns the marked spans. The result
    is then one sample with the marked spans outside skipped messages, or no sample if there are no
    such spans. `skip` contains the indices of messages that are not in the loss. The pattern
    `special_pattern` matches special tokens.

    Some templates, such as GLM-4's, put no special token after an answer. The special token that
    begins the next turn is then in the loss, because the model must generate it to stop. This token
    is also added after the last answer.

    Raises AlignmentError if an answer cannot be found."""
    answer_indices = {i for i, message in enumerate(messages) if message["role"] == ASSISTANT}
    trained_indices = sorted(answer_indices.difference(skip))
    if not trained_indices:
        return []
    full_text = render(messages)
    if render_marked is not None:
        spans = [(first, last) for first, last in render_marked() if first < last]
        for index in answer_indices.intersection(skip):
            answer = _find_answer(render, messages, index, special_pattern)
            positions = range(answer.start, len(answer.text))
            spans = [span for span in spans if span[0] not in positions]
        # An answer may have several marked spans. The last one must contain the end token.
        num_without_end_token = 0
        length = len(full_text)
        for (first, last), (following, _) in itertools.pairwise([*spans, (length, length)]):
            ends = following == length or special_pattern.search(full_text, last, following)
            if ends and not special_pattern.search(full_text, first, last):
                num_without_end_token += 1
        return [Rendered(full_text, spans, num_without_end_token)] if spans else []
    shared_spans = list[Span]()
    separate_samples = list[Rendered]()
    num_without_end_token = 0
    for index in trained_indices:
        text, start, end, stop = _find_answer(render, messages, index, special_pattern)
        if start == len(text) and messages[index].get("content"):
            raise AlignmentError(f"the template omits message {index + 1}, which is an answer")
        is_silent = special_pattern.sub("", text[start:]).strip() == ""
        if is_silent and messages[index].get("tool_calls"):
            continue  # The template omits the calls, and silence is not an answer.
        lacks_end_token = 0 if stop or special_pattern.search(text, start) else 1
        if full_text.startswith(text):
            end = len(text)
        elif start < end and full_text.startswith(text[:end]):
            # White space after the end token belongs to the answer, as at the end of the text.
            end = len(full_text) - len(full_text[end:].lstrip())
        else:
            text += stop
            separate_samples.append(
                Rendered(
                    text,
                    [(start, len(text))],
                    lacks_end_token,
                )
            )
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


def _find_answer(
    render: Render,
    messages: Sequence[Message],
    index: int,
    special_pattern: re.Pattern[str],
) -> _Answer:
    """Render the conversation up to and including the answer `messages[index]`, and locate this
    answer in the rendered text. Raises AlignmentError if the answer cannot be found."""
    earlier_messages = list(messages[:index])
    answer = messages[index]
    text = render([*earlier_messages, answer])
    # Render other content in place of the answer to find the text that the template puts around an
    # answer.
    reply = {"role": ASSISTANT, "content": _PLACEHOLDER}
    probe = _try_render(render, [*earlier_messages, reply])
    header, separator, tail = probe.partition(_PLACEHOLDER)
    stop = ""
    if separator and not special_pattern.search(tail):
        role = "tool" if answer.get("tool_calls") else "user"
        next_turn = {"role": role, "content": "?"}
        with_next_turn = _try_render(render, [*earlier_messages, reply, next_turn])
        next_mark = special_pattern.match(with_next_turn, len(probe))
        if with_next_turn.startswith(probe) and next_mark:
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
    prompt = _try_render(render, earlier_messages, ask=True)
    if prompt and text.startswith(prompt):
        start = len(prompt)
        content = answer.get("content")
        overlap = text[len(header) : start]
        if header and overlap and isinstance(content, str) and content.startswith(overlap):
            start = len(header)  # The answer begins with the end of the question.
        return _Answer(text, start, end, stop)
    if header and prompt and earlier_messages:
        # The template renders a question without an answer differently from a question with an
        # answer.
        question = {**earlier_messages[-1], "content": _PLACEHOLDER}
        probe_messages = [*earlier_messages[:-1], question]
        question_end = _try_render(render, probe_messages, ask=True).partition(_PLACEHOLDER)[2]
        pieces = _try_render(render, [*probe_messages, reply]).split(_PLACEHOLDER)
        if question_end and len(pieces) == 3 and pieces[1].startswith(question_end):
            answer_text = pieces[1][len(question_end) :] + text[len(header) :]
            return _Answer(prompt + answer_text, len(prompt), 0, stop)
    if not header:
        # The answer has reasoning, but the prompt ends with an empty block of reasoning. As in
        # TRL's templates for training, the answer begins with its own block.
        empty_thought = _EMPTY_THOUGHT.search(prompt)
        header = prompt[: empty_thought.start()] if empty_thought else ""
        if not (header and text.startswith(header)):
            which = f"message {index + 1}, an answer,"
            raise AlignmentError(f"{which} is not at the position where the template puts answers")
    return _Answer(text, len(header), end, stop)


def _try_render(
    render: Render,
    messages: Sequence[Message],
    **options: Any,
) -> str:
    """Return the rendered `messages`, or "" if the template cannot render them."""
    try:
        return render(messages, **options)
    except Exception:  # A template can raise any error for unexpected messages.
        return ""


def loses_thoughts(message: Mapping[str, Any], text: str) -> bool:
    """Return whether a message has reasoning that is missing from `text`, which is in the loss."""
    thoughts = [message.get(key) for key in ("reasoning_content", "thinking", "reasoning")]
    content = message.get("content")
    if isinstance(content, str):
        thoughts += _THOUGHT.findall(content)
    return any(isinstance(thought, str) and thought.strip() not in text for thought in thoughts)


def join_parts(messages: Sequence[Message]) -> list[Message]:
    """Return `messages`, with each list of content parts joined into one string."""
    with_texts = []
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            message = {
                **message,
                "content": "".join(part["text"] for part in content),
            }
        with_texts.append(message)
    return with_texts
