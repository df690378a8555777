"""What the pictures share: page, colours, and a rank x time grid drawn from a timeline.

A page is WIDTH inches at DPI, shown about half as wide in a README, so no text is below 8 points.
Colours are those of Okabe and Ito ("Color Universal Design", 2008), with a dark green for W, so
that F, B, I and W differ in lightness too.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from pipedream.ops import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Op, Schedule
from pipedream.simulator import Event, Timeline

WIDTH, DPI = 11.4, 150
TITLE, TEXT, SMALL, LEAST = 15.0, 12.5, 11.0, 8.0

KIND_COLOURS = {
    FORWARD: "#56B4E9",
    BACKWARD: "#D55E00",
    INPUT_GRADIENT: "#F0E442",
    WEIGHT_GRADIENT: "#00523B",
}
KIND_TEXTS = {
    FORWARD: "F  forward",
    BACKWARD: "B  whole backward",
    INPUT_GRADIENT: "I  input gradient",
    WEIGHT_GRADIENT: "W  weight gradient",
}
LINE_COLOURS = (
    "#000000", "#0072B2", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#56B4E9", "#6E6E6E",
)  # fmt: skip
EDGE, GREY = "#333333", "#6E6E6E"
IDLE_HATCH: dict[str, Any] = {
    "facecolor": "#FFFFFF",
    "edgecolor": "#C9C9C9",
    "hatch": "////",
    "linewidth": 0.0,
}

Colour = str | tuple[float, float, float] | tuple[float, float, float, float]
Colouring = Callable[[Op], Colour]
Labeller = Callable[[Op], str]
Box = tuple[float, float, float, float]
"""x, y, width, height in data units."""

ROW = 0.88
"""Height of a rank's cells, where ranks are 1 apart."""


def new_figure(
    title: str,
    panel_heights: Sequence[float],
    *,
    columns: int = 1,
    legend: Sequence[Artist] = (),
    legend_columns: int = 6,
    notes: Sequence[str] = (),
    left: float = 0.95,
    right: float = 0.4,
    gap: float = 0.75,
    head: float = 0.4,
    bottom: float = 0.7,
) -> tuple[Figure, list[Axes]]:
    """A page: title, legend, rows of panels, lines of notes; all lengths in inches.

    `panel_heights` has one height a row, `gap` lies between rows, `head` above the first one.
    """
    lines = _even_lines(title, 88)
    legend_rows = -(-len(legend) // legend_columns)
    top = 0.15 + 0.29 * len(lines) + 0.33 * legend_rows + head
    bottom += 0.26 * len(notes) + (0.05 if notes else 0)
    height = top + sum(panel_heights) + gap * (len(panel_heights) - 1) + bottom
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    edge = 0.2 / WIDTH
    figure.text(
        edge, 1 - 0.12 / height, "\n".join(lines), fontsize=TITLE, fontweight="bold", va="top"
    )
    if notes:
        place = edge, 0.1 / height
        figure.text(*place, "\n".join(notes), fontsize=SMALL - 1, color=GREY, linespacing=1.3)
    if legend:
        figure.legend(
            handles=list(legend),
            ncols=min(legend_columns, len(legend)),
            loc="upper left",
            bbox_to_anchor=(edge, 1 - (0.17 + 0.29 * len(lines)) / height),
            fontsize=SMALL,
            frameon=False,
            borderaxespad=0.0,
            borderpad=0.2,
            columnspacing=1.6,
            handlelength=1.6,
        )
    width = (WIDTH - left - right - (columns - 1) * left) / columns
    axes, y = [], height - top
    for panel_height in panel_heights:
        y -= panel_height
        for column in range(columns):
            x = left + column * (width + left)
            box = (x / WIDTH, y / height, width / WIDTH, panel_height / height)
            axes.append(figure.add_axes(box))
        y -= gap
    for ax in axes:
        _plain(ax)
    return figure, axes


def _even_lines(text: str, longest: int) -> list[str]:
    """As few lines as possible, and those about equally long."""
    count = len(textwrap.wrap(text, longest))
    widths = range(len(text) // count, longest + 1)
    return next(
        lines for lines in (textwrap.wrap(text, width) for width in widths) if len(lines) == count
    )


def _plain(ax: Axes) -> None:
    ax.tick_params(labelsize=SMALL, color=GREY)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(GREY)


def save(figure: Figure, path: Path) -> Figure:
    """Write a PNG or SVG that is the same for the same data; the page, for those who look into
    it."""
    metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    with rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(path, metadata=metadata)
    return figure


def percent(share: Fraction | float) -> str:
    """A share as '27%'; below 10% with one decimal unless that is a zero: '5.9%', '0%'."""
    value = 100 * float(share)
    return f"{value:.1f}".removesuffix(".0") + "%" if value < 9.95 else f"{value:.0f}%"


def number(value: Fraction | float) -> str:
    """At most two decimals and none that are zeros: 33, 5.5, 2.33; 1e+06 and 0.001 as such."""
    shown = float(value)
    if shown and not 0.01 <= abs(shown) < 1e5:
        return f"{shown:.3g}"
    return f"{shown:.2f}".rstrip("0").rstrip(".")


def ink(background: Colour) -> str:
    """Black or white, whichever reads better on a colour."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(background)
    ]
    luminance = sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "black" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "white"


def kind_colours(schedule: Schedule) -> Colouring:
    """The colour of an operation's kind, paler for a rank's second, third ... stage.

    Of two copies of the model, the second one's stages are the paler ones on all ranks.
    """
    position, own = schedule.position(), stages_by_rank(schedule)
    copy = {stage: number for number, chain in enumerate(schedule.chains) for stage in chain}
    pale = {
        stage: place / max(2, len(stages))
        for stages in own
        for place, stage in enumerate(sorted(stages, key=lambda s: (copy[s], position[s])))
    }

    return lambda op: _paler(KIND_COLOURS[op.kind], pale[op.stage])


def darker(colour: str) -> Colour:
    """A line's colour as one that its name can be read in."""
    red, green, blue = to_rgb(colour)
    return (0.65 * red, 0.65 * green, 0.65 * blue)


def _paler(colour: str, share: float) -> Colour:
    red, green, blue = to_rgb(colour)
    return (red + share * (1 - red), green + share * (1 - green), blue + share * (1 - blue))


def stages_by_rank(schedule: Schedule) -> list[set[int]]:
    """The stages whose operations each rank runs."""
    return [{op.stage for item in order for op in item.parts} for order in schedule.orders]


def microbatch_number(op: Op) -> str:
    """What cells show by default."""
    return str(op.microbatch)


def kind_legend(timelines: Sequence[Timeline]) -> list[Artist]:
    """Swatches for the kinds that occur, and for idle time."""
    kinds = {op.kind for timeline in timelines for op in timeline.schedule.ops()}
    swatches: list[Artist] = [
        Patch(facecolor=colour, edgecolor=EDGE, linewidth=0.6, label=KIND_TEXTS[kind])
        for kind, colour in KIND_COLOURS.items()
        if kind in kinds
    ]
    if any(len(own) > 1 for t in timelines for own in stages_by_rank(t.schedule)):
        second = _paler(KIND_COLOURS[FORWARD], 1 / 2)
        copies = {len(t.schedule.chains) for t in timelines}
        text = "paler: 2nd stage or copy" if max(copies) > 1 else "paler: a rank's second stage"
        swatches.append(Patch(facecolor=second, edgecolor=EDGE, linewidth=0.6, label=text))
    return [*swatches, Patch(**IDLE_HATCH, label="idle")]


def row_height(num_ranks: int) -> float:
    """Inches for one rank's row: lower where there are many."""
    return max(0.16, min(0.34, 2.2 / num_ranks))


def draw_grid(
    ax: Axes,
    timeline: Timeline,
    *,
    until: Fraction | None = None,
    colour: Colouring | None = None,
    labels: Sequence[Labeller] = (microbatch_number,),
) -> None:
    """One rectangle for each operation: x and width are its time, y its rank (0 on top).

    The halves of a pair share the rank's row. The time axis ends at `until` (the makespan). Cells
    get the first of `labels` that fits in all of them, or the last in those where it fits. Each
    rectangle's gid is the operation as text; behind them lies one a rank, "idle 0", from time 0 to
    the makespan.
    """
    colour = colour or kind_colours(timeline.schedule)
    end = timeline.makespan if until is None else until
    num_ranks = timeline.schedule.num_ranks
    ax.set_xlim(0, 1.002 * float(end))
    ax.set_ylim(num_ranks - 0.5, -0.5)
    for rank in range(num_ranks):
        place = (0.0, rank - ROW / 2), float(timeline.makespan), ROW
        ax.add_patch(Rectangle(*place, **IDLE_HATCH, gid=f"idle {rank}"))
    cells = [cell for event in timeline.all_events() for cell in _cells(event)]
    narrowest = min(box[2] for _, box in cells if box[2] > 0) * points_per_unit(ax)[0]
    edge: dict[str, Any] = {"edgecolor": EDGE, "linewidth": min(0.6, 0.08 * narrowest)}
    for op, (x, y, width, height) in cells:
        cell = Rectangle((x, y), width, height, facecolor=colour(op), **edge, gid=str(op))
        ax.add_patch(cell)
    inside = [(op, box) for op, box in cells if box[0] + box[2] <= float(end) and box[2] > 0]
    _write_labels(ax, inside, colour, labels)
    rank_axis(ax, num_ranks)


def points_per_unit(ax: Axes) -> tuple[float, float]:
    """Printer's points that one unit of an axes' x and of its y takes."""
    (left, right), (low, high) = ax.get_xlim(), ax.get_ylim()
    return (
        ax.bbox.width / abs(right - left) * 72 / DPI,
        ax.bbox.height / abs(high - low) * 72 / DPI,
    )


def rank_axis(ax: Axes, num_ranks: int, *, most_times: int = 12) -> None:
    """A tick for every rank, and at most so many for whole times."""
    ax.set_yticks(range(num_ranks), [str(rank) for rank in range(num_ranks)])
    ax.set_ylabel("rank", fontsize=TEXT)
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=most_times, integer=True))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda time, _: number(time)))


def _cells(event: Event) -> list[tuple[Op, Box]]:
    """(operation, box): a pair's forward lies above its backward."""
    parts = event.item.parts
    height = ROW / len(parts)
    return [
        (
            op,
            (
                float(event.start),
                event.rank - ROW / 2 + place * height,
                float(event.end - event.start),
                height,
            ),
        )
        for place, op in enumerate(parts)
    ]


def _write_labels(
    ax: Axes, cells: Sequence[tuple[Op, Box]], colour: Colouring, labels: Sequence[Labeller]
) -> None:
    across, down = points_per_unit(ax)

    def room(op: Op, box: Box, label: Labeller) -> float:
        """The largest font, in points, with which the label stays inside the cell."""
        lines = label(op).split("\n")
        # A digit of DejaVu Sans is 0.64 of the font's size wide, a line 1.2 of it high.
        by_width = (box[2] * across - 2) / (0.66 * max(map(len, lines)))
        return min(by_width, (box[3] * down - 1) / (1.2 * len(lines)))

    for label in labels:
        rooms = [room(op, box, label) for op, box in cells]
        if min(rooms, default=0) >= LEAST:
            break
    size = min(SMALL, max(LEAST, min(rooms, default=0)))
    # Where some cells are too small, their kind goes without: half a row of numbers misleads.
    tight = {
        (op.kind, box[3]) for (op, box), space in zip(cells, rooms, strict=True) if space < size
    }
    for op, (x, y, width, height) in cells:
        if (op.kind, height) not in tight:
            ax.text(
                x + width / 2, y + height / 2, label(op), ha="center", va="center",
                fontsize=size, color=ink(colour(op)), linespacing=1.05,
            )  # fmt: skip
