"""What a check says of an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any


class WrongAnswer(Exception):
    """What is wrong with an answer, in words for who wrote it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an exercise is solved, and what to tell."""

    solved: bool
    text: str

    def __repr__(self) -> str:
        return f"{'Right' if self.solved else 'Not solved yet'}: {self.text}"


def graded(check: Callable[..., str]) -> Callable[..., Verdict]:
    """A check that returns what is right, or raises WrongAnswer, as one that gives a Verdict.

    The answer is somebody's code, so whatever it raises is told, too.
    """

    @wraps(check)
    def judge(*answers: Any) -> Verdict:
        try:
            return Verdict(True, check(*answers))
        except WrongAnswer as wrong:
            return Verdict(False, str(wrong))
        except Exception as error:
            text = str(error).strip().split("\n")[0]
            return Verdict(False, f"your code raises {type(error).__name__}: {text}")

    return judge


def tell(what: str, guess: object, found: object) -> None:
    """Print a run's result beside what was guessed."""
    print(f"{what}: {found}   (your guess: {'none yet' if guess is None else guess})")
