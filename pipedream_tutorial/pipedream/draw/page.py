"""What the pictures share: the page, its colours, and labels beside points.

A page is WIDTH inches at DPI, shown about half as wide in a README, so no text is below 8 points.
Colours are those of Okabe and Ito ("Color Universal Design", 2008), with a dark green for W, so
that F, B, I and W differ in lightness too.
"""

import textwrap
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import product
from math import hypot
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

WIDTH = 11.4
DPI = 150
TITLE = 15.0
TEXT = 12.5
SMALL = 11.0
LEAST = 8.0

LINE_COLOURS = (
    "#000000", "#0072B2", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#56B4E9", "#6E6E6E",
)  # fmt: skip
EDGE, GREY = "#333333", "#6E6E6E"

Colour = str | tuple[float, float, float] | tuple[float, float, float, float]


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
) -> tuple[Figure, list[Axes]]:
    """A page: title, legend, rows of panels, lines of notes; all lengths in inches.

    `panel_heights` has one height a row, `gap` lies between rows, `head` above the first one.
    """
    # As few lines as possible, and those about equally long.
    lines = min((textwrap.wrap(title, width) for width in range(1, 89)), key=len)
    legend_rows = -(-len(legend) // legend_columns)
    top = 0.15 + 0.29 * len(lines) + 0.33 * legend_rows + head
    bottom = 0.75 + 0.26 * len(notes) if notes else 0.7
    height = top + sum(panel_heights) + gap * (len(panel_heights) - 1) + bottom
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    edge = 0.2 / WIDTH
    above = edge, 1 - 0.12 / height, "\n".join(lines)
    figure.text(*above, fontsize=TITLE, fontweight="bold", va="top")
    below = edge, 0.1 / height, "\n".join(notes)
    figure.text(*below, fontsize=SMALL - 1, color=GREY, linespacing=1.3)
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
    y = height - top
    for panel_height in panel_heights:
        y -= panel_height
        for column in range(columns):
            x = left + column * (width + left)
            ax = figure.add_axes((x / WIDTH, y / height, width / WIDTH, panel_height / height))
            ax.tick_params(labelsize=SMALL, color=GREY)
            ax.set_axisbelow(True)
            ax.spines[["top", "right"]].set_visible(False)
            ax.spines[["left", "bottom"]].set_color(GREY)
        y -= gap
    return figure, figure.axes


def save(figure: Figure, path: Path, source: str | None = None) -> Figure:
    """Write a PNG or SVG that is the same for the same data, and return it. A PNG's metadata
    holds `source`, the digest of what was drawn."""
    metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None, "Source": source}
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


def darker(colour: str) -> Colour:
    """A line's colour as one that its name can be read in."""
    red, green, blue = to_rgb(colour)
    return (0.65 * red, 0.65 * green, 0.65 * blue)


def paler(colour: str, share: float) -> Colour:
    red, green, blue = to_rgb(colour)
    return (red + share * (1 - red), green + share * (1 - green), blue + share * (1 - blue))


def panel_title(ax: Axes, text: str) -> None:
    ax.set_title(text, fontsize=TEXT, loc="left", pad=5)


Point = tuple[float, float]
Box = tuple[float, float, float, float]
"""Left, low, right, high in pixels."""
POINT = DPI / 72
"""Pixels that a printer's point takes."""
DOT = 9.0
GAP = 11.0
FAR = 18.0
"""In points: half a marker, from a marker to its label, and from where on a line leads there."""


class Spot(NamedTuple):
    """A place for one label."""

    distance: float  # from its point, in points
    end: Point  # where a line from far away ends, in pixels
    boxes: list[Box]  # what it covers: the label, and small ones along such a line


def place_labels(ax: Axes, labels: Mapping[Point, str], avoid: Sequence[Point] = ()) -> None:
    """Write labels beside their points (data units) so that they hide no point, each other, a line
    that leads to a label, or what lies at `avoid`. The axes' limits are set before.

    Several orders of placing are tried; the one that leaves labels closest to their points wins.
    Raises RuntimeError where there is no room.
    """
    to_pixels: Any = ax.transData.transform
    obstacles = [_around(to_pixels(point), DOT) for point in labels]
    obstacles += [_around(to_pixels(point), 1) for point in avoid]
    spots = {point: _spots(ax, to_pixels(point), label) for point, label in labels.items()}

    def arranged(order: Sequence[Point]) -> dict[Point, Spot]:
        """Each label in turn at the nearest free spot, as far as there is one."""
        taken = list(obstacles)
        placed = {}
        for point in order:
            for spot in spots[point]:
                if not any(_overlap(new, old) for new in spot.boxes for old in taken):
                    taken += spot.boxes
                    placed[point] = spot
                    break
        return placed

    tries = [
        arranged(sorted(labels, key=lambda point: (a * point[first], b * point[1 - first])))
        for first, a, b in product((0, 1), (1, -1), (1, -1))
    ]
    possible = [placed for placed in tries if len(placed) == len(labels)]
    if not possible:
        raise RuntimeError("there is no room for all labels")
    best = min(possible, key=lambda placed: sum(spot.distance for spot in placed.values()))
    to_data = ax.transData.inverted().transform
    for point, spot in best.items():
        left, low, _, high = spot.boxes[0]
        x, y = to_data((left, (low + high) / 2))
        ax.text(x, y, labels[point], fontsize=SMALL, va="center_baseline")
        if spot.distance > FAR:
            xs, ys = zip(point, to_data(spot.end), strict=True)
            ax.plot(xs, ys, color=GREY, linewidth=0.8, zorder=1)


def _around(pixel: Point, margin: float) -> Box:
    """A box with so many points of margin."""
    x, y = pixel
    m = margin * POINT
    return (x - m, y - m, x + m, y + m)


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _spots(ax: Axes, anchor: Point, label: str) -> list[Spot]:
    """Where in the axes the label of a point (pixels) may go, the nearest first."""
    probe = ax.text(0, 0, label, fontsize=SMALL)
    width, height = probe.get_window_extent().size
    probe.remove()
    inside = ax.bbox.extents
    x, y = anchor
    wide = width / POINT
    lefts = [GAP, 24.0, 50.0, 90.0, 140.0, 200.0, -GAP - wide, -50.0 - wide, -wide / 2]
    found = []
    for left, up in product(lefts, sorted(range(235, -240, -5), key=abs)):
        near = x + left * POINT
        low = y + up * POINT - height / 2
        box = (near, low, near + width, low + height)
        if near < inside[0] or low < inside[1] or box[2] > inside[2] or box[3] > inside[3]:
            continue
        end = (min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3]))
        across = end[0] - x
        along = end[1] - y
        distance = hypot(across, along) / POINT
        if left < 0:
            distance += 4  # on the right a label reads as the point's own
        boxes = [box]
        if distance > FAR:
            steps = max(2, int(hypot(across, along) / 6))
            ways = [(across * k / steps, along * k / steps) for k in range(steps)]
            outside = (DOT + 0.5) * POINT
            boxes += [_around((x + a, y + b), 1) for a, b in ways if max(abs(a), abs(b)) >= outside]
        found.append(Spot(distance, end, boxes))
    return sorted(found, key=lambda spot: spot.distance)
