"""Show timelines as pictures in a notebook, and as text elsewhere."""

import io
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from pipedream.draw.grids import Panel, cost_text, lay_out
from pipedream.draw.page import DPI, WIDTH
from pipedream.draw.terminal import draw
from pipedream.schedules.ops import Schedule
from pipedream.schedules.orders import SCHEDULES
from pipedream.simulate.simulator import Timeline, build_costs, check_complete, simulate


class TimelinePicture(NamedTuple):
    """Stacked timelines, shown as a picture in a notebook and as text in a terminal."""

    title: str
    timelines: Sequence[Timeline]

    def __repr__(self) -> str:
        parts = [self.title]
        for timeline in self.timelines:
            parts += ["", describe(timeline), draw(timeline, columns=90)]
        return "\n".join(parts)

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        panels = [Panel(describe(timeline), timeline) for timeline in self.timelines]
        buffer = io.BytesIO()
        lay_out(self.title, panels).savefig(buffer)
        return buffer.getvalue(), {"width": int(WIDTH * DPI / 2)}


def describe(timeline: Timeline) -> str:
    """Return text with a timeline's schedule, makespan, idle share, and peak activations."""
    schedule = timeline.schedule
    title = SCHEDULES[schedule.name].title if schedule.name in SCHEDULES else schedule.name
    return f"{title}: {cost_text(timeline)}"


def run(schedule: Schedule) -> Timeline:
    """Simulate the schedule with F = I = W = 1, so B = 2."""
    check_complete(schedule)
    return simulate(schedule, build_costs(schedule))


def show(title: str, *schedules: Schedule) -> TimelinePicture:
    """Simulate the schedules with F = I = W = 1, and return one picture of their timelines."""
    return TimelinePicture(title, [run(schedule) for schedule in schedules])


def tell(
    question: str,
    guess: object,
    result: object,
    *,
    right: object = None,
    why: str = "",
    picture: Any = None,
) -> Any:
    """Print `result`, the guess, and whether the guess is right. Also print `why`, and return the
    picture. If the guess is None, only ask for a guess and return None. `right` is the correct
    guess if it differs from `result`."""
    if guess is None:
        print(f"{question}: write your guess instead of None, and run this cell again")
        return None
    verdict = "right" if agree(guess, result if right is None else right) else "not right"
    print(f"{question}: {result}   (your guess: {guess}, {verdict})")
    if why:
        print(why)
    return picture


def agree(guess: object, found: object) -> bool:
    """Return whether all numbers in a guess match the result, within 2%, or within half a
    percentage point if the result is below 1. If the guess has no numbers, all its words must occur
    in the result. The values 0.75, 75, "75%" and "3/4" count as the same share."""
    guessed, expected = numbers_in(guess), numbers_in(found)
    if not guessed:
        words, known = (set(re.findall(r"\w+", str(text).lower())) for text in (guess, found))
        return bool(words) and words <= known
    return len(guessed) == len(expected) and all(map(_close, guessed, expected))


def _close(guess: Fraction, found: Fraction) -> bool:
    difference = abs(guess - found)
    if found < 1:  # a share, or a percentage
        return min(difference, abs(guess / 100 - found)) <= Fraction(1, 200)
    return difference <= found / 50


def numbers_in(value: object) -> list[Fraction]:
    """Return the numbers in a value, a list of values, or a string. Percentages become shares."""
    if isinstance(value, (list, tuple)):
        return [number for item in value for number in numbers_in(item)]
    numbers = []
    for digits, sign in re.findall(r"(\d+(?:\.\d+)?(?:/[1-9]\d*)?)\s*(%?)", str(value)):
        numerator, _, denominator = digits.partition("/")
        numbers.append(Fraction(numerator) / Fraction(denominator or 1) / (100 if sign else 1))
    return numbers
