"""Timelines as pictures in a notebook, and as text where there is no picture."""

import io
from collections.abc import Sequence

from pipedream.draw.grids import Panel, cost_text, lay_out
from pipedream.draw.page import DPI, WIDTH
from pipedream.draw.terminal import draw
from pipedream.schedules.ops import Schedule
from pipedream.schedules.orders import SCHEDULES
from pipedream.simulate.simulator import Timeline, build_costs, simulate

COLUMNS = 90


class Shown:
    """One timeline above the other; a notebook shows the picture, a terminal the text."""

    def __init__(self, title: str, timelines: Sequence[Timeline]) -> None:
        self.title = title
        self.timelines = timelines

    def __repr__(self) -> str:
        parts = [self.title]
        for timeline in self.timelines:
            parts += ["", describe(timeline), draw(timeline, COLUMNS)]
        return "\n".join(parts)

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        from PIL import Image

        panels = [Panel(describe(timeline), timeline) for timeline in self.timelines]
        figure = lay_out(self.title, panels)
        drawn = io.BytesIO()
        small = io.BytesIO()
        figure.savefig(drawn)
        Image.open(drawn).convert("RGB").quantize(32).save(small, "png", optimize=True)
        return small.getvalue(), {"width": int(WIDTH * DPI / 2)}


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
