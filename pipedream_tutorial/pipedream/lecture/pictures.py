"""Timelines as pictures in a notebook, and as text where there is no picture."""

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

from pipedream.draw.grids import Panel, cost_text, lay_out
from pipedream.draw.page import DPI, WIDTH
from pipedream.draw.terminal import draw
from pipedream.schedules.ops import Schedule
from pipedream.schedules.orders import SCHEDULES
from pipedream.simulate.simulator import Timeline, build_costs, simulate


class Shown(NamedTuple):
    """One timeline above the other; a notebook shows the picture, a terminal the text."""

    title: str
    timelines: Sequence[Timeline]

    def __repr__(self) -> str:
        parts = [self.title]
        for timeline in self.timelines:
            parts += ["", describe(timeline), draw(timeline, columns=90)]
        return "\n".join(parts)

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        panels = [Panel(describe(timeline), timeline) for timeline in self.timelines]
        drawn = io.BytesIO()
        lay_out(self.title, panels).savefig(drawn)
        return drawn.getvalue(), {"width": int(WIDTH * DPI / 2)}


def describe(timeline: Timeline) -> str:
    """A schedule's name and what it costs."""
    schedule = timeline.schedule
    title = SCHEDULES[schedule.name].title if schedule.name in SCHEDULES else schedule.name
    return f"{title}: {cost_text(timeline)}"


def run(schedule: Schedule) -> Timeline:
    """The schedule on the simulator's clock: F = I = W = 1, so B = 2."""
    return simulate(schedule, build_costs(schedule))


def show(title: str, *schedules: Schedule) -> Shown:
    """The schedules, simulated, as one picture."""
    return Shown(title, [run(schedule) for schedule in schedules])


def tell(what: str, guess: object, found: object, *, why: str = "", picture: Any = None) -> Any:
    """Print a run's result beside the guess, and give the picture back; nothing before a guess."""
    if guess is None:
        print(f"{what}: write your guess instead of None, and run this cell again")
        return None
    print(f"{what}: {found}   (your guess: {guess})")
    if why:
        print(why)
    return picture
