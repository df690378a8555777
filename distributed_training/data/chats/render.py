"""Chat templates, rendered by transformers in a process of their own: a template is somebody's
program, and may fail, never end, or fill the memory. The parent names the row and goes on.

Lines of JSON go both ways: first {"templates", "marks", "names"}, then batches of conversations.
Each conversation is answered by itself, so that the one that ends the process is known."""

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

from distributed_training.data.chats.align import AlignmentError, Rendered, align, joined
from distributed_training.data.pieces import Message, Span
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import ROOT

CPU_S = 2.0  # for one text
MEMORY_BYTES = 2**29  # beyond what the process begins with
MOST_CHARACTERS = 2**20  # of a text, beyond four times its conversation


class Conversation(NamedTuple):
    """What a template is given, and which messages are not trained on."""

    messages: list[Message]
    tools: list[Any] | None = None
    documents: list[Any] | None = None
    values: dict[str, Any] = {}  # noqa: RUF012, of the template's own variables
    skip: list[int] = []  # noqa: RUF012


class Renderer:
    """The parent's side. `template` is the text, or one without tools and one with them."""

    def __init__(
        self, templates: Sequence[str], names: dict[str, Any], marks: Sequence[str]
    ) -> None:
        setup = {"templates": templates, "names": names, "marks": marks, "cpu_s": CPU_S}
        self._setup = json.dumps(setup)
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> subprocess.Popen[str]:
        """Begin to import, which takes a second or two; what is asked later waits for it."""
        if self._process is None:
            command = [sys.executable, "-m", __name__]
            # -m imports what is in the folder where one stands before all else.
            kwargs: Any = {"cwd": ROOT, "encoding": "utf-8"}
            kwargs |= {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            self._process = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL, **kwargs)
            self._send(self._process, self._setup)
        return self._process

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def align(self, batch: Sequence[tuple[str, Conversation]]) -> list[list[Rendered]]:
        """The samples of each conversation; raises UserError with its place for the first that its
        template does not render."""
        answers = self._ask([conversation for _, conversation in batch])
        samples = []
        for (where, _), answer in zip(batch, answers, strict=True):
            if isinstance(answer, str):
                if len(batch) > 1:  # it would answer for the others first
                    self.close()
                what = f"{where} does not go with the chat template"
                raise UserError(what, answer, "change the row, or the model's chat template")
            samples.append([Rendered(*sample) for sample in answer])
        return samples

    def ask(self, messages: list[Message]) -> str:
        """The text up to where the answer to the last message begins."""
        (answer,) = self._ask([Conversation(messages)], question=True)
        if isinstance(answer, str):
            raise UserError("the chat template does not take this question", answer)
        return answer[0]

    def _ask(self, batch: Sequence[Conversation], question: bool = False) -> Iterator[Any]:
        process = self.start()
        assert process.stdout is not None
        self._send(process, json.dumps({"question": question, "batch": batch}))
        for _ in batch:
            line = process.stdout.readline()
            if not line.endswith("\n"):
                code = process.wait()
                self.close()
                why = f"it takes more than {CPU_S:g} s" if code == -signal.SIGPROF else "it fails"
                yield f"{why} (exit code {code})"
                return
            yield json.loads(line)

    @staticmethod
    def _send(process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
        except BrokenPipeError:  # seen when the answer is read
            pass


def main() -> None:
    """The child's side, until the parent closes its end."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    answer = answering(**json.loads(sys.stdin.readline()))
    _limit_memory()
    for line in sys.stdin:
        asked = json.loads(line)
        for conversation in asked["batch"]:
            found = answer(Conversation(*conversation), asked["question"])
            print(json.dumps(found), file=answers, flush=True)


def answering(
    templates: Sequence[str], names: dict[str, Any], marks: Sequence[str], cpu_s: float = CPU_S
) -> Callable[[Conversation, bool], Any]:
    """What answers in the child: the samples of a conversation, or its text as a question; a string
    says why there are none. A text that takes too long ends the process."""
    import warnings

    warnings.simplefilter("ignore")
    from transformers.utils.chat_template_utils import render_jinja_template

    pattern = re.compile("|".join(map(re.escape, marks)) or "(?!)")

    def render_raw(
        conversation: Conversation, messages: Sequence[Any], **options: Any
    ) -> tuple[str, list[Span]]:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        found: Any = render_jinja_template(
            conversations=[list(messages)], tools=conversation.tools,
            documents=conversation.documents, chat_template=templates[bool(conversation.tools)],
            **{**names, **conversation.values}, **options,
        )  # fmt: skip
        signal.setitimer(signal.ITIMER_PROF, 0)
        texts, spans = found
        limit = MOST_CHARACTERS + 4 * len(json.dumps(messages))
        if len(texts[0]) > limit:
            raise MemoryError(f"its text has more than {limit / 1e6:.0f} million characters")
        return texts[0], spans[0] if spans else []

    @functools.cache
    def takes_parts() -> bool:
        """Whether the template reads contents that are lists of parts."""
        said = {"role": "user", "content": [{"type": "text", "text": word} for word in "ZX"]}
        try:
            text = render_raw(Conversation([]), [said])[0]
        except MemoryError:
            raise
        except Exception:  # as when it adds a text to a list
            return False
        return re.search(r"Z\s*X", text) is not None

    def answer(conversation: Conversation, question: bool) -> Any:
        def render(messages: Sequence[Message], *, ask: bool = False) -> str:
            return render_raw(conversation, messages, add_generation_prompt=ask)[0]

        try:
            said = (message.get("content") for message in conversation.messages)
            if any(isinstance(content, list) for content in said) and not takes_parts():
                conversation = conversation._replace(messages=joined(conversation.messages))
            if question:
                return [render(conversation.messages, ask=True)]
            marked = None
            if has_marks(templates[bool(conversation.tools)]):
                options = {"return_assistant_tokens_mask": True}
                marked = render_raw(conversation, conversation.messages, **options)[1]
            skip = conversation.skip
            return align(render, conversation.messages, marked=marked, marks=pattern, skip=skip)
        except AlignmentError as error:
            return str(error)
        except MemoryError as error:
            return str(error) or f"it takes more than {MEMORY_BYTES / 2**20:.0f} MiB"
        except Exception as error:  # what a template raises is its own affair
            return " ".join(f"{type(error).__name__}: {error}".split())[:500]
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    return answer


def has_marks(template: str) -> bool:
    """Whether a template says itself what the assistant generates."""
    return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_BYTES, now + MEMORY_BYTES))


if __name__ == "__main__":
    main()
