"""Draw the three animations of lecture.ipynb as GIFs, from simulated timelines."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import checkout  # noqa: F401
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from PIL import Image
from pipedream.draw.grids import (
    IDLE_HATCH,
    ROW,
    Panel,
    cost_text,
    draw_grid,
    durations_text,
    grid_height,
    kind_legend,
)
from pipedream.draw.page import (
    DPI,
    EDGE,
    LINE_COLORS,
    SMALL,
    TEXT,
    WIDTH,
    Color,
    contrast_color,
    lighten,
    new_figure,
    panel_title,
)
from pipedream.schedules.ops import Op, Schedule, build_from_orders
from pipedream.schedules.orders import build_schedule
from pipedream.schedules.policies import POLICIES, WeightUse, weight_use
from pipedream.simulate.simulator import Timeline, build_costs, simulate

from results.lab.tutorial.figures import events_text

SCALE = 1.25  # pixels of a frame per pixel of the page
COLORS = 32
MOVES = 8
"""Number of frames from one timeline to the next."""
MOVE_MS, UNIT_MS, REST_MS, LAST_MS = 80, 500, 2000, 4000
"""Duration of a frame in milliseconds: while moving, per unit of time, at rest, and at the end."""

Frames = Iterator[tuple[Figure, int]]
"""Pictures, each with the number of milliseconds for which it is shown."""


class Animation(NamedTuple):
    """An animation's labels, its timelines, and the function that draws its frames. The digest
    covers only the labels and the timelines."""

    texts: tuple[str, ...]
    timelines: tuple[Timeline, ...]
    frames: Callable[[], Frames]


def digest(animation: Animation) -> str:
    """Return a digest of every label, and of every event's start and end."""
    parts = [*animation.texts, *(line for t in animation.timelines for line in events_text(t))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def draw_animation(animation: Animation, path: Path) -> None:
    """Save the GIF. Its comment contains a digest of the drawn data."""
    figures, durations = zip(*animation.frames(), strict=True)
    images = [_to_image(figure) for figure in figures]
    width, height = images[0].size
    # The first, middle and last frame determine the colors.
    sheet = Image.new("RGB", (width, 3 * height))
    for row, image in enumerate((images[0], images[len(images) // 2], images[-1])):
        sheet.paste(image, (0, row * height))
    palette = sheet.quantize(COLORS)
    first, *others = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    first.save(
        path,
        save_all=True,
        append_images=others,
        duration=list(durations),
        loop=0,
        comment=digest(animation).encode(),
    )


def _to_image(figure: Figure) -> Image.Image:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    image = Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba())
    width = int(WIDTH * DPI * SCALE / 2)
    return image.convert("RGB").resize((width, round(image.height * width / image.width)))


def from_gpipe_to_1f1b() -> Animation:
    """Animate how the ranks change from GPipe to 1F1B, beginning with the last rank."""
    p, m = 4, 8
    first, last = build_schedule("gpipe", p, m), build_schedule("1f1b", p, m)
    steps = [("GPipe", _run(first))]
    for first_rank in reversed(range(p)):
        orders = first.orders[:first_rank] + last.orders[first_rank:]
        text = f"1F1B from rank {first_rank} on" if first_rank else "1F1B on all ranks"
        steps.append((text, _run(replace(last, orders=orders))))
    return _morph_animation("From GPipe to 1F1B: the same time, less memory", steps)


def w_fills_holes() -> Animation:
    """Animate four steps. The first shows whole backward passes, and the second shows each pass
    split into I and W. In the third, a stage waits only for the I of the next stage. In the fourth,
    W is delayed until the rank would otherwise idle."""
    unsplit = _run(build_schedule("1f1b", 4, 8))
    split_schedule = _cut_in_place(unsplit.schedule)
    steps = [
        ("1F1B with whole backward passes", unsplit),
        ("Each backward pass is I and W", _split_backward(unsplit, split_schedule)),
        ("A stage waits only for the next stage's I", _run(split_schedule)),
        ("W waits until its rank would idle (ZB-H1)", _run(build_schedule("zb-h1", 4, 8))),
    ]
    return _morph_animation("Zero bubble: W fills idle time", steps)


def _run(schedule: Schedule) -> Timeline:
    return simulate(schedule, build_costs(schedule))


def _cut_in_place(schedule: Schedule) -> Schedule:
    """Return the schedule with every B replaced by I, followed directly by W."""
    halves = {"B": ("I", "W")}
    lines = [
        [
            Op(kind, op.stage, op.microbatch)
            for item in order
            for op in item.parts
            for kind in halves.get(op.kind, (op.kind,))
        ]
        for order in schedule.orders
    ]
    return build_from_orders("cut", lines)


def _split_backward(timeline: Timeline, cut: Schedule) -> Timeline:
    """Return the timeline with each whole backward pass split into two halves."""
    spans = dict(timeline.times)
    for op, (start, end) in timeline.times.items():
        if op.kind == "B":
            middle = (start + end) / 2
            spans[op._replace(kind="I")] = start, middle
            spans[op._replace(kind="W")] = middle, end
    return _place_events(cut, timeline, spans)


def _place_events(
    schedule: Schedule, template: Timeline, spans: dict[Op, tuple[Fraction, Fraction]]
) -> Timeline:
    """Return a timeline with the given starts and ends. It may violate data dependencies, so use it
    only for drawing."""
    tick = Fraction(1, 1000)
    lines = [[spans[op] for item in order for op in item.parts] for order in schedule.orders]
    return replace(
        template,
        schedule=schedule,
        tick=tick,
        starts=tuple(tuple(int(start / tick) for start, _ in line) for line in lines),
        ends=tuple(tuple(int(end / tick) for _, end in line) for line in lines),
    )


def interpolate(before: Timeline, after: Timeline, share: Fraction) -> Timeline:
    """Return a timeline between two timelines. A `share` of 0 gives the times of `before`, and a
    `share` of 1 gives the times of `after`."""
    old, spans = before.times, {}
    for op, (start, end) in after.times.items():
        old_start, old_end = old[op]
        spans[op] = old_start + share * (start - old_start), old_end + share * (end - old_end)
    return _place_events(after.schedule, after, spans)


def _morph_animation(title: str, steps: Sequence[tuple[str, Timeline]]) -> Animation:
    """Return an animation that rests at each step and moves between steps."""
    steps = [(f"{text}: {cost_text(timeline)}", timeline) for text, timeline in steps]
    timelines = [timeline for _, timeline in steps]

    def frames() -> Frames:
        for (text, before), (next_text, after) in pairwise(steps):
            yield _morph_frame(title, timelines, text, before), REST_MS
            if set(before.times) != set(after.times):
                continue  # splitting a pass moves nothing
            for move in range(1, MOVES):
                share = Fraction(move, MOVES)
                eased = share * share * (3 - 2 * share)  # slow at both ends
                timeline = interpolate(before, after, eased)
                yield _morph_frame(title, timelines, next_text, timeline), MOVE_MS
        yield _morph_frame(title, timelines, *steps[-1]), LAST_MS

    return Animation((title, *(text for text, _ in steps)), tuple(timelines), frames)


def _morph_frame(title: str, steps: Sequence[Timeline], text: str, timeline: Timeline) -> Figure:
    heights = [1.5 * grid_height(timeline)]
    figure, (ax,) = new_figure(title, heights, legend=kind_legend(steps))
    draw_grid(ax, Panel(text, timeline), until=max(step.makespan for step in steps))
    raise_labels(ax)
    ax.set_xlabel(f"time in units: {durations_text(timeline)}", fontsize=TEXT)
    return figure


def raise_labels(ax: Axes) -> None:
    """Draw each number directly above its own cell. A cell that moves over another cell then also
    covers the other cell's number."""
    cells: dict[tuple[float, float], list[float]] = {}
    for height, cell in enumerate(ax.patches):
        if not isinstance(cell, Rectangle) or str(cell.get_gid()).startswith("idle"):
            continue
        cell.set_zorder(2 + height / 1000)
        cells.setdefault(tuple(cell.get_center()), []).append(cell.get_zorder())
    for label in ax.texts:
        label.set_zorder(cells[label.get_position()].pop(0) + 1 / 2000)


def weight_stashing() -> Animation:
    """Animate PipeDream on 3 stages over time, with the weight versions of each stage below."""
    timeline = _run(build_schedule("1f1b", 3, 6))
    use = weight_use(timeline.schedule, POLICIES["stash"], 6)
    title = "Weight stashing: a stage keeps a version until its last microbatch returns"
    # The middle of every time unit, and the end.
    moments = [Fraction(2 * t + 1, 2) for t in range(int(timeline.makespan))]
    moments.append(timeline.makespan)

    def frames() -> Frames:
        for moment in moments:
            shown_ms = LAST_MS if moment == timeline.makespan else UNIT_MS
            yield _stash_frame(title, timeline, use, moment), shown_ms

    texts = (title, *(str(versions_at(timeline, use, moment)) for moment in moments))
    return Animation(texts, (timeline,), frames)


def versions_at(
    timeline: Timeline, use: dict[int, WeightUse], moment: Fraction
) -> list[dict[int, list[int]]]:
    """For each stage, map each weight version to the microbatches in flight whose forward pass used
    it. The newest version is always included."""
    times = timeline.times
    frames = []
    for stage, stage_use in sorted(use.items()):
        updates = sum(times[Op("B", stage, i)][1] <= moment for i in stage_use.forward)
        microbatches_of: dict[int, list[int]] = {updates: []}
        for i, version in sorted(stage_use.forward.items()):
            begun, done = times[Op("F", stage, i)][0], times[Op("B", stage, i)][1]
            if begun <= moment < done:
                microbatches_of.setdefault(version, []).append(i)
        frames.append(dict(sorted(microbatches_of.items())))
    return frames


def _shade(version: int) -> Color:
    return lighten(LINE_COLORS[1 + version], 0.25)


def _stash_frame(
    title: str, timeline: Timeline, use: dict[int, WeightUse], moment: Fraction
) -> Figure:
    p, now, end = timeline.schedule.num_ranks, float(moment), float(timeline.makespan)
    heights = [1.6 * grid_height(timeline), 1.9 * grid_height(timeline)]
    legend = [Patch(**IDLE_HATCH, label="idle")]
    figure, (grid_axes, stash_axes) = new_figure(title, heights, legend=legend, gap=0.95)

    def color(op: Op) -> Color:
        return _shade(use[op.stage].version(op))

    text = "F and B of each microbatch, colored by the weight version they use"
    draw_grid(grid_axes, Panel(text, timeline, [lambda op: f"{op.kind}{op.microbatch}"], color))
    overlay: dict[str, Any] = {"facecolor": "white", "alpha": 0.85, "zorder": 4, "linewidth": 0}
    grid_axes.add_patch(Rectangle((now, -0.5), end - now, p, **overlay))
    grid_axes.axvline(now, color="black", linewidth=2, zorder=5)
    newest = max(version for one in use.values() for version in one.forward.values()) + 2
    _draw_stash(stash_axes, versions_at(timeline, use, moment), newest)
    return figure


def _draw_stash(ax: Axes, versions_by_stage: Sequence[dict[int, list[int]]], newest: int) -> None:
    """Draw a box for each weight version that a stage keeps, with the microbatches that need it."""
    ax.set_xlim(-0.6, newest + 0.1)
    ax.set_ylim(len(versions_by_stage) - 0.5, -0.5)
    ax.set_yticks(range(len(versions_by_stage)), map(str, range(len(versions_by_stage))))
    ax.set_ylabel("stage", fontsize=TEXT)
    ax.set_xticks([])
    ax.tick_params(length=0)
    text = "Versions kept now (thick: the newest), and the microbatches in flight that need them"
    panel_title(ax, text)
    for stage, versions in enumerate(versions_by_stage):
        for version, needed_by in versions.items():
            new, shade = version == max(versions), _shade(version)
            edge: dict[str, Any] = {"edgecolor": EDGE, "linewidth": 0.8}
            if new:
                edge = {"edgecolor": "black", "linewidth": 2.5}
            corner = version - 0.44, stage - ROW / 2
            ax.add_patch(Rectangle(corner, 0.88, ROW, facecolor=shade, **edge))
            lines = [f"v{version}"]
            if needed_by:
                lines.append(f"for {', '.join(map(str, needed_by))}")
            style: dict[str, Any] = {
                "ha": "center",
                "va": "center",
                "fontsize": SMALL,
                "color": contrast_color(shade),
            }
            ax.text(version, stage, "\n".join(lines), **style)


ANIMATIONS: dict[str, Callable[[], Animation]] = {
    "lecture_1f1b": from_gpipe_to_1f1b,
    "lecture_stashing": weight_stashing,
    "lecture_zero_bubble": w_fills_holes,
}
