"""The three moving pictures of lecture.ipynb, as GIFs drawn from simulated timelines.

Drawn by results/lab/tutorial_pages.py --write, as the pictures in steps.py are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from PIL import Image

from pipedream.draw.figures import cost_text, panel_title, time_label
from pipedream.draw.grid import draw_grid, kind_legend, row_height
from pipedream.draw.moving import LAST_MS, Animation, Frame, as_image
from pipedream.draw.page import new_figure
from pipedream.draw.stashing import weight_stashing
from pipedream.schedules.ops import (
    BACKWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Op,
    Schedule,
    as_orders,
    one_chain,
)
from pipedream.schedules.orders import gpipe, one_f_one_b, zb_h1
from pipedream.simulate.measures import times_of
from pipedream.simulate.simulator import Timeline, build_costs, simulate

MOVE_MS, REST_MS = 80, 2000
MOVES = 8
"""Frames between two timelines."""


class Step(NamedTuple):
    """A timeline to come to rest at, and what to say of it."""

    text: str
    timeline: Timeline


def _run(schedule: Schedule) -> Timeline:
    return simulate(schedule, build_costs(schedule))


def _described(text: str, timeline: Timeline) -> Step:
    return Step(f"{text}: {cost_text(timeline)}", timeline)


def from_gpipe_to_1f1b() -> Animation:
    """The ranks turn to one forward, one backward: the last one first."""
    p, m = 4, 8
    first, last = gpipe(p, m), one_f_one_b(p, m)
    steps = [_described("GPipe", _run(first))]
    for turned in reversed(range(p)):
        orders = first.orders[:turned] + last.orders[turned:]
        text = f"1F1B from rank {turned} on" if turned else "1F1B on all ranks"
        steps.append(_described(text, _run(replace(last, orders=orders))))
    title = "From GPipe to 1F1B: the same time, less memory"
    return _moving(title, steps)


def w_fills_holes() -> Animation:
    """Whole backward passes; the same cut in two; W put off until the rank would idle."""
    whole = one_f_one_b(4, 8)
    at_once = _cut_in_place(whole)
    late = zb_h1(4, 8)
    before = _run(whole)
    steps = [
        _described("1F1B, the backward pass whole", before),
        _described("Each backward pass is I and W", _halved(before, at_once)),
        _described("A stage waits only for the next one's I", _run(at_once)),
        _described("W waits until its rank would idle (ZB-H1)", _run(late)),
    ]
    return _moving("Zero bubble: W fills the holes", steps)


def _cut_in_place(schedule: Schedule) -> Schedule:
    """Every B as I, and W right after it."""
    lines = [
        [
            Op(kind, op.stage, op.microbatch)
            for item in order
            for op in item.parts
            for kind in ((INPUT_GRADIENT, WEIGHT_GRADIENT) if op.kind == BACKWARD else (op.kind,))
        ]
        for order in schedule.orders
    ]
    return Schedule(name="cut", orders=as_orders(lines), chains=one_chain(schedule.num_ranks))


def _halved(timeline: Timeline, cut: Schedule) -> Timeline:
    """The times of whole backward passes, each as two halves."""
    times = times_of(timeline)
    spans = {}
    for op, (start, end) in times.items():
        middle = (start + end) / 2
        if op.kind == BACKWARD:
            spans[op._replace(kind=INPUT_GRADIENT)] = start, middle
            spans[op._replace(kind=WEIGHT_GRADIENT)] = middle, end
        else:
            spans[op] = start, end
    return _placed(cut, timeline, spans)


def _placed(
    schedule: Schedule, like: Timeline, spans: dict[Op, tuple[Fraction, Fraction]]
) -> Timeline:
    """A timeline with these starts and ends, whatever the data allow: to be drawn only."""
    tick = Fraction(1, 1000)
    lines = [[spans[op] for item in order for op in item.parts] for order in schedule.orders]
    return replace(
        like,
        schedule=schedule,
        tick=tick,
        starts=tuple(tuple(int(start / tick) for start, _ in line) for line in lines),
        ends=tuple(tuple(int(end / tick) for _, end in line) for line in lines),
        bounds=tuple((None,) * len(line) for line in lines),
    )


def between(before: Timeline, after: Timeline, share: Fraction) -> Timeline:
    """Every operation so far on its way."""
    old, new = times_of(before), times_of(after)
    spans = {}
    for op, (start, end) in new.items():
        begun, ended = old[op]
        spans[op] = begun + share * (start - begun), ended + share * (end - ended)
    return _placed(after.schedule, after, spans)


def _moving(title: str, steps: Sequence[Step]) -> Animation:
    return Animation(
        texts=(title, *(step.text for step in steps)),
        timelines=tuple(step.timeline for step in steps),
        frames=partial(_move, title, steps),
    )


def _move(title: str, steps: Sequence[Step]) -> Iterator[Frame]:
    """At rest at each step, and the ways between them."""
    until = max(step.timeline.makespan for step in steps)
    draw = partial(_grid_frame, title, kind_legend([step.timeline for step in steps]), until)
    for before, after in pairwise(steps):
        yield draw(before.text, before.timeline), REST_MS
        if set(times_of(before.timeline)) != set(times_of(after.timeline)):
            continue  # cut in two: nothing moves
        for move in range(1, MOVES):
            share = _eased(Fraction(move, MOVES))
            yield draw(after.text, between(before.timeline, after.timeline, share)), MOVE_MS
    yield draw(steps[-1].text, steps[-1].timeline), LAST_MS


def _eased(share: Fraction) -> Fraction:
    """Slow at both ends."""
    return share * share * (3 - 2 * share)


def _grid_frame(
    title: str, legend: Sequence[Artist], until: Fraction, text: str, timeline: Timeline
) -> Image.Image:
    ranks = timeline.schedule.num_ranks
    figure, (ax,) = new_figure(title, [1.5 * ranks * row_height(ranks)], legend=legend, head=0.45)
    draw_grid(ax, timeline, until=until)
    stack(ax)
    panel_title(ax, text)
    time_label(ax, timeline)
    return as_image(figure)


def stack(ax: Axes) -> None:
    """A cell that another one passes takes its number along below it."""
    cells: dict[tuple[float, float], list[float]] = {}
    for height, cell in enumerate(ax.patches):
        if not isinstance(cell, Rectangle) or str(cell.get_gid()).startswith("idle"):
            continue
        cell.set_zorder(2 + height / 1000)
        centre = cell.get_x() + cell.get_width() / 2, cell.get_y() + cell.get_height() / 2
        cells.setdefault(centre, []).append(cell.get_zorder())
    for label in ax.texts:
        label.set_zorder(cells[label.get_position()].pop(0) + 1 / 2000)


ANIMATIONS: dict[str, Callable[[], Animation]] = {
    "lecture_1f1b": from_gpipe_to_1f1b,
    "lecture_stashing": weight_stashing,
    "lecture_zero_bubble": w_fills_holes,
}
