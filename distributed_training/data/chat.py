"""A model's own chat template: how it was, and is, told who says what. No torch import."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import NoReturn

from distributed_training.data.pieces import ASSISTANT, Message, Piece
from distributed_training.settings.errors import UserError


class ChatTemplate:
    """A Jinja template in Hugging Face's convention, run in a sandbox."""

    def __init__(self, text: str, eos_token: str, bos_token: str) -> None:
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self.text = text
        self.eos = eos_token
        sandbox = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        sandbox.filters["tojson"] = json.dumps
        marks = {"eos_token": eos_token, "bos_token": bos_token}
        sandbox.globals |= {"raise_exception": _refuse, **marks}
        self._template = sandbox.from_string(text)

    def render(self, messages: Sequence[Message], *, ask: bool = False) -> str:
        """The text of a conversation; with `ask` up to where the next answer begins."""
        return self._template.render(messages=messages, add_generation_prompt=ask)

    def cut(self, messages: Sequence[Message], where: str) -> list[Piece]:
        """What a template makes of a conversation, of which the answers are learnt; where it shows
        earlier ones otherwise once there are later ones, as without their thoughts, only those."""
        pieces = list[Piece]()
        done = ""
        try:
            for place, message in enumerate(messages):
                if message["role"] == ASSISTANT:
                    whole = self.render(messages[: place + 1])
                    begun = self.render(messages[:place], ask=True)
                    asked = os.path.commonprefix([begun, whole])  # noqa: RUF071, no paths
                    if not asked.startswith(done):
                        pieces = []
                        done = ""
                    question = asked[len(done) :]
                    pieces.append(Piece(question, in_loss=False, eos=False, ends=False))
                    pieces.append(Piece(whole[len(asked) :], eos=False, ends=False))
                    done = whole
        except Exception as error:  # what a template raises is its own affair
            raise UserError(f"{where} does not go with the chat template", str(error)) from None
        # What is to end the text ends it once.
        eos = not done.rstrip().endswith(self.eos)
        return [*pieces[:-1], pieces[-1]._replace(eos=eos, ends=True)] if pieces else []

    def end_of_answer(self) -> str:
        """What follows an answer."""
        said = [{"role": "user", "content": "?"}, {"role": ASSISTANT, "content": "answered"}]
        return self.render(said).rpartition("answered")[2].strip()


def _refuse(words: str) -> NoReturn:
    raise ValueError(words)
