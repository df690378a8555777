"""Render chat templates with transformers in a child process.

A template is third-party code that may fail, run forever or exhaust memory. The parent process
survives such a failure and reports the record that caused it. Parent and child exchange lines of
JSON: first the arguments of `build_responder`, then batches of conversations. The child answers
each conversation separately, so that the parent knows which conversation made the child fail."""

import functools
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from distributed_training.data.chats.align import AlignmentError, Rendered, align, join_parts
from distributed_training.data.pieces import Message, Span
from distributed_training.settings.errors import UserError, describe
from distributed_training.settings.files import ROOT

CPU_S = 2.0  # CPU time limit for one rendering
MEMORY_BYTES = 2**29  # limit on memory beyond the memory in use before the first request
# Maximum number of characters in rendered text, in addition to four times the length of the
# conversation
MAX_CHARACTERS = 2**20


class Conversation(NamedTuple):
    """Arguments of a chat template, and the messages that are not in the loss."""

    messages: list[Message]
    tools: list[Any] | None = None
    documents: list[Any] | None = None
    template_kwargs: dict[str, Any] = {}  # noqa: RUF012, other variables of the template
    skip: list[int] = []  # noqa: RUF012, indices of messages that are not in the loss


class Renderer:
    """The parent's interface to the child process that renders templates.

    `templates` contains two templates: one for conversations without tools and one for
    conversations with tools. `variables` contains the variables that both templates can use."""

    def __init__(
        self, templates: Sequence[str], variables: dict[str, Any], special_tokens: Sequence[str]
    ) -> None:
        setup = {
            "templates": templates,
            "variables": variables,
            "special_tokens": special_tokens,
            "cpu_s": CPU_S,
        }
        self._setup = json.dumps(setup)
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> subprocess.Popen[str]:
        """Start the child process unless it is already running. The first request waits for the
        child's imports, which take one to two seconds."""
        if self._process is None:
            command = [sys.executable, "-m", __name__]
            # `python -m` imports from the current folder first, so the child starts in the
            # checkout.
            kwargs: Any = {"cwd": ROOT, "encoding": "utf-8"}
            kwargs |= {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            self._process = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL, **kwargs)
            self._send(self._process, self._setup)
        return self._process

    def close(self) -> None:
        """Kill the child process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def render_samples(self, batch: Sequence[tuple[str, Conversation]]) -> list[list[Rendered]]:
        """Return the samples of each conversation in `batch`, which contains pairs (location in the
        dataset, conversation). Raises UserError with the location of the first conversation that
        the template cannot render."""
        replies = self._request([conversation for _, conversation in batch])
        samples = []
        for (where, _), reply in zip(batch, replies, strict=True):
            if isinstance(reply, str):
                if len(batch) > 1:  # The child may still send later replies.
                    self.close()
                what = f"{where} cannot be rendered by the chat template"
                raise UserError(what, reply, "change the record or the chat template")
            samples.append([Rendered(*sample) for sample in reply])
        return samples

    def render_prompt(self, messages: list[Message]) -> str:
        """Return the text of a conversation up to the start of the answer to its last message.
        Raises UserError if the template cannot render the conversation."""
        (reply,) = self._request([Conversation(messages)], prompt_only=True)
        if isinstance(reply, str):
            raise UserError("the chat template cannot render this question", reply)
        return reply[0]

    def _request(self, batch: Sequence[Conversation], prompt_only: bool = False) -> Iterator[Any]:
        process = self.start()
        assert process.stdout is not None
        request = {"prompt_only": prompt_only, "batch": batch}
        # Tables may contain values that JSON cannot represent, such as dates. As in transformers, a
        # template sees the name of the value's type instead.
        line = json.dumps(request, default=lambda value: f"<{type(value).__name__}>")
        self._send(process, line)
        for _ in batch:
            line = process.stdout.readline()
            if not line.endswith("\n"):
                code = process.wait()
                self.close()
                why = f"rendering takes more than {CPU_S:g} s of CPU time"
                if code != -signal.SIGPROF:
                    why = "rendering failed"
                yield f"{why} (exit code {code})"
                return
            yield json.loads(line)

    @staticmethod
    def _send(process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
        except BrokenPipeError:  # The child has exited, which is detected when its reply is read.
            pass


def main() -> None:
    """Answer requests in the child process until the parent closes the pipe."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    respond = build_responder(**json.loads(sys.stdin.readline()))
    _limit_memory()
    for line in sys.stdin:
        request = json.loads(line)
        for conversation in request["batch"]:
            result = respond(Conversation(*conversation), request["prompt_only"])
            print(json.dumps(result), file=replies, flush=True)


def build_responder(
    templates: Sequence[str],
    variables: dict[str, Any],
    special_tokens: Sequence[str],
    cpu_s: float = CPU_S,
) -> Callable[[Conversation, bool], Any]:
    """Return the function that answers requests in the child process.

    The function accepts a conversation and a Boolean. If the Boolean is False, it returns a list of
    samples. If the Boolean is True, it returns a list that contains only the text up to the start
    of the answer to the last message. If the template fails, it returns the reason as a string. If
    one rendering takes more than `cpu_s` seconds of CPU time, the process is killed."""
    import warnings

    warnings.simplefilter("ignore")
    from transformers.utils.chat_template_utils import render_jinja_template

    special_pattern = re.compile("|".join(map(re.escape, special_tokens)) or "(?!)")

    def render_raw(
        conversation: Conversation, messages: Sequence[Any], **options: Any
    ) -> tuple[str, list[Span]]:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        rendered: Any = render_jinja_template(
            conversations=[list(messages)], tools=conversation.tools,
            documents=conversation.documents, chat_template=templates[bool(conversation.tools)],
            **{**variables, **conversation.template_kwargs}, **options,
        )  # fmt: skip
        signal.setitimer(signal.ITIMER_PROF, 0)
        texts, spans = rendered
        limit = MAX_CHARACTERS + 4 * len(json.dumps(messages))
        if len(texts[0]) > limit:
            raise MemoryError(f"the text has more than {limit / 1e6:.0f} million characters")
        return texts[0], spans[0] if spans else []

    @functools.cache
    def accepts_parts() -> bool:
        """Return whether the template accepts messages whose content is a list of parts."""
        probe = {"role": "user", "content": [{"type": "text", "text": word} for word in "ZX"]}
        try:
            text = render_raw(Conversation([]), [probe])[0]
        except MemoryError:
            raise
        except Exception:  # for example, the template adds a string to a list
            return False
        return re.search(r"Z\s*X", text) is not None

    def respond(conversation: Conversation, prompt_only: bool) -> Any:
        def render(messages: Sequence[Message], *, ask: bool = False) -> str:
            return render_raw(conversation, messages, add_generation_prompt=ask)[0]

        try:
            contents = (message.get("content") for message in conversation.messages)
            if any(isinstance(content, list) for content in contents) and not accepts_parts():
                conversation = conversation._replace(messages=join_parts(conversation.messages))
            if prompt_only:
                return [render(conversation.messages, ask=True)]
            marked = None
            if has_marks(templates[bool(conversation.tools)]):
                options = {"return_assistant_tokens_mask": True}
                marked = render_raw(conversation, conversation.messages, **options)[1]
            skip = conversation.skip
            return align(
                render,
                conversation.messages,
                marked=marked,
                special_pattern=special_pattern,
                skip=skip,
            )
        except AlignmentError as error:
            return str(error)
        except MemoryError as error:
            mebibytes = MEMORY_BYTES / 2**20
            return str(error) or f"rendering needs more than {mebibytes:.0f} MiB of memory"
        except Exception as error:  # A template can raise any error.
            return describe(error)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    return respond


def has_marks(template: str) -> bool:
    """Return whether a template marks the text that the assistant generates."""
    return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None


def _limit_memory() -> None:
    """Limit the address space of this process to its present size plus MEMORY_BYTES."""
    with open("/proc/self/statm") as file:
        present_bytes = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(
        resource.RLIMIT_AS, (present_bytes + MEMORY_BYTES, present_bytes + MEMORY_BYTES)
    )


if __name__ == "__main__":
    main()
