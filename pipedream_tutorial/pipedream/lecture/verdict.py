"""What a check says of an answer."""

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


def tell(what: str, guess: object, found: object, *, why: str = "", picture: Any = None) -> Any:
    """Print a run's result beside the guess, and give the picture back; nothing before a guess."""
    if guess is None:
        print(f"{what}: write your guess instead of None, and run this cell again")
        return None
    print(f"{what}: {found}   (your guess: {guess})")
    if why:
        print(why)
    return picture
