"""What the pictures share: the page, its colours, and labels beside points.

A page is WIDTH inches at DPI, shown about half as wide in a README, so no text is below 8 points.
Colours are those of Okabe and Ito ("Color Universal Design", 2008), with a dark green for W, so
that F, B, I and W differ in lightness too.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
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
    axes = []
    y = height - top
    for panel_height in panel_heights:
        y -= panel_height
        for column in range(columns):
            x = left + column * (width + left)
            box = (x / WIDTH, y / height, width / WIDTH, panel_height / height)
            axes.append(figure.add_axes(box))
        y -= gap
    for ax in axes:
        ax.tick_params(labelsize=SMALL, color=GREY)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(GREY)
    return figure, axes


def _even_lines(text: str, longest: int) -> list[str]:
    """As few lines as possible, and those about equally long."""
    count = len(textwrap.wrap(text, longest))
    widths = range(len(text) // count, longest + 1)
    return next(
        lines for lines in (textwrap.wrap(text, width) for width in widths) if len(lines) == count
    )


def save(figure: Figure, path: Path, source: str | None = None) -> Figure:
    """Write a PNG or SVG that is the same for the same data; the page, for those who look into
    it. A PNG's metadata holds `source`, the digest of what was drawn."""
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
DOT = 9.0
GAP = 11.0
FAR = 18.0
"""In points: half a marker, from a marker to its label, and from where on a line leads there."""


class Spot(NamedTuple):
    """A place for one label, in pixels."""

    distance: float
    box: Box
    lead: tuple[Point, Point] | None
    """From the point to the label's edge, where it is far."""


def place_labels(
    figure: Figure, ax: Axes, labels: Mapping[Point, str], avoid: Sequence[Point] = ()
) -> None:
    """Write labels beside their points (data units) so that they hide no point, each other, a line
    that leads to a label, or what lies at `avoid`.

    Several orders of placing are tried; the one that leaves labels closest to their points wins.
    Raises RuntimeError where there is no room.
    """
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    figure.draw_without_rendering()
    anchors = {point: _pixels(ax, point) for point in labels}
    sizes = {}
    for point, label in labels.items():
        probe = ax.text(0, 0, label, fontsize=SMALL)
        box = probe.get_window_extent(renderer)
        sizes[point] = (box.width, box.height)
        probe.remove()
    obstacles = [_around(anchor, anchor, DOT) for anchor in anchors.values()]
    obstacles += [_around(at, at, 1) for at in (_pixels(ax, point) for point in avoid)]
    orders = [
        sorted(labels, key=lambda point: (a * point[first], b * point[1 - first]))
        for first, a, b in product((0, 1), (1, -1), (1, -1))
    ]
    inside: Box = ax.get_window_extent(renderer).extents
    tries = [_arrange(order, anchors, sizes, obstacles, inside) for order in orders]
    possible = [spots for spots in tries if spots is not None]
    if not possible:
        raise RuntimeError("there is no room for all labels")
    best = min(possible, key=lambda spots: sum(spot.distance for spot in spots.values()))
    to_data = ax.transData.inverted()
    for point, spot in best.items():
        left, middle = to_data.transform((spot.box[0], (spot.box[1] + spot.box[3]) / 2))
        ax.text(left, middle, labels[point], fontsize=SMALL, va="center_baseline")
        if spot.lead is not None:
            ends = to_data.transform(spot.lead)
            ax.plot(ends[:, 0], ends[:, 1], color=GREY, linewidth=0.8, zorder=1)


def _pixels(ax: Axes, point: Point) -> Point:
    x, y = ax.transData.transform(point)
    return float(x), float(y)


def _around(a: Point, b: Point, margin: float) -> Box:
    """The box that holds two corners and so many points of margin."""
    m = margin * DPI / 72
    (ax, ay), (bx, by) = a, b
    return (min(ax, bx) - m, min(ay, by) - m, max(ax, bx) + m, max(ay, by) + m)


def _arrange(
    order: Sequence[Point],
    anchors: Mapping[Point, Point],
    sizes: Mapping[Point, tuple[float, float]],
    obstacles: Sequence[Box],
    inside: Box,
) -> dict[Point, Spot] | None:
    """Each label in turn at the nearest free spot; None where one finds none."""
    taken = list(obstacles)
    placed = {}
    for point in order:
        own = _around(anchors[point], anchors[point], DOT)
        for spot in _spots(anchors[point], *sizes[point]):
            path = [] if spot.lead is None else _along(spot.lead, own)
            left, low, right, high = spot.box
            within = inside[0] <= left and inside[1] <= low
            within = within and right <= inside[2] and high <= inside[3]
            if within and not any(_overlap(new, old) for new in [spot.box, *path] for old in taken):
                taken += [spot.box, *path]
                placed[point] = spot
                break
        else:
            return None
    return placed


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _along(lead: tuple[Point, Point], own: Box) -> list[Box]:
    """Small boxes along a line, those on its own marker left out."""
    (x0, y0), (x1, y1) = lead
    steps = max(2, int(np.hypot(x1 - x0, y1 - y0) / 6))
    dots = [(x0 + (x1 - x0) * k / steps, y0 + (y1 - y0) * k / steps) for k in range(steps)]
    return [_around(dot, dot, 1) for dot in dots if not _overlap(_around(dot, dot, 0.5), own)]


def _spots(anchor: Point, width: float, height: float) -> list[Spot]:
    """Where a label of this size (pixels) may go, the nearest first."""
    unit, (x, y) = DPI / 72, anchor
    lefts = [GAP, 24.0, 50.0, 90.0, 140.0, 200.0]
    lefts += [-left - width / unit for left in (GAP, 50.0)]
    lefts.append(-width / unit / 2)
    heights = [sign * step for step in range(0, 240, 5) for sign in (1, -1)]
    found = []
    for left, up in product(lefts, heights):
        near = x + left * unit
        low = y + up * unit - height / 2
        box = (near, low, near + width, low + height)
        end = (min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3]))
        distance = float(np.hypot(end[0] - x, end[1] - y)) / unit
        if left < 0:
            distance += 4  # on the right a label reads as the point's own
        found.append(Spot(distance, box, ((x, y), end) if distance > FAR else None))
    return sorted(found, key=lambda spot: spot.distance)
