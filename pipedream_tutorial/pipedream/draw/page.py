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
from operator import itemgetter
from pathlib import Path

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
) -> tuple[Figure, list[Axes]]:
    """A page: title, legend, rows of panels, lines of notes; all lengths in inches. `panel_heights`
    has one a row, `gap` lies between rows, `head` above the first one."""
    # As few lines as possible, and those about equally long.
    lines = min((textwrap.wrap(title, width) for width in range(1, 89)), key=len)
    legend_rows = -(-len(legend) // legend_columns)
    top = 0.15 + 0.29 * len(lines) + 0.33 * legend_rows + head
    bottom = 0.75 + 0.26 * len(notes) if notes else 0.7
    height = top + sum(panel_heights) + gap * (len(panel_heights) - 1) + bottom
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    edge = 0.2 / WIDTH
    figure.text(edge, 1 - 0.12 / height, "\n".join(lines), size=TITLE, weight="bold", va="top")
    below = "\n".join(notes)
    figure.text(edge, 0.1 / height, below, size=SMALL - 1, color=GREY, linespacing=1.3)
    if legend:
        figure.legend(
            handles=list(legend), ncols=min(legend_columns, len(legend)), loc="upper left",
            bbox_to_anchor=(edge, 1 - (0.17 + 0.29 * len(lines)) / height), fontsize=SMALL,
            frameon=False, borderaxespad=0.0, borderpad=0.2, columnspacing=1.6, handlelength=1.6,
        )  # fmt: skip
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
    red, green, blue = (c**2.2 for c in to_rgb(background))  # the light that a screen gives
    return "black" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 else "white"


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
POINT = DPI / 72  # pixels that a printer's point takes
DOT, GAP, FAR = 9.0, 11.0, 18.0
"""In points: half a marker, from a marker to its label, and from where on a line leads there."""


def place_labels(ax: Axes, labels: Mapping[Point, str], avoid: Sequence[Point] = ()) -> None:
    """Write labels beside their points (data units) so that they hide no point, each other, a line
    that leads to a label, or what lies at `avoid`. The axes' limits are set before.

    Several orders of placing are tried; the one that leaves labels closest to their points wins.
    Raises RuntimeError where there is no room.
    """
    pixels = ax.transData.transform([*labels, *avoid])
    own, others = pixels[: len(labels)], pixels[len(labels) :]
    marks = np.vstack((_around(own, DOT), _around(others, 1)))
    spots = {point: _spots(ax, at, labels[point]) for point, at in zip(labels, own, strict=True)}
    tries = []
    for first, a, b in product((0, 1), (1, -1), (1, -1)):
        taken = marks
        placed: dict[Point, Spot] = {}
        for point in sorted(labels, key=lambda point: (a * point[first], b * point[1 - first])):
            free = (spot for spot in spots[point] if not _overlap(spot[2], taken))
            spot = next(free, None)
            if spot is None:
                break
            placed[point] = spot
            taken = np.vstack((taken, spot[2]))
        else:
            tries.append(placed)
    if not tries:
        raise RuntimeError("there is no room for all labels")
    best = min(tries, key=lambda placed: sum(distance for distance, _, _ in placed.values()))
    to_data = ax.transData.inverted().transform
    for point, (distance, end, boxes) in best.items():
        left, low, _, high = boxes[0]
        x, y = to_data((left, (low + high) / 2))
        ax.text(x, y, labels[point], fontsize=SMALL, va="center_baseline")
        if distance > FAR:
            ax.plot(*zip(point, to_data(end), strict=True), color=GREY, linewidth=0.8, zorder=1)


Spot = tuple[float, np.ndarray, np.ndarray]
"""A place for a label: how far from its point, in points; where a line from far away ends, in
pixels; and the boxes that it covers, the label's and small ones along such a line. A box is a row
of left, low, right, high in pixels."""


def _spots(ax: Axes, anchor: np.ndarray, label: str) -> list[Spot]:
    """Where in the axes the label of a point (pixels) may go, the nearest first."""
    probe = ax.text(0, 0, label, fontsize=SMALL)
    size = np.array(probe.get_window_extent().size)
    probe.remove()
    x, y = anchor
    wide = size[0] / POINT
    lefts = [GAP, 24.0, 50.0, 90.0, 140.0, 200.0, -GAP - wide, -50.0 - wide, -wide / 2]
    found = []
    for left, up in product(lefts, sorted(range(235, -240, -5), key=abs)):
        low = np.array((x + left * POINT, y + up * POINT - size[1] / 2))
        high = low + size
        if (low < ax.bbox.min).any() or (high > ax.bbox.max).any():
            continue
        end = anchor.clip(low, high)
        way = end - anchor
        # On the right a label reads as the point's own.
        distance = hypot(*way) / POINT + (4 if left < 0 else 0)
        boxes = np.hstack((low, high))[None]
        if distance > FAR:
            steps = max(2, int(hypot(*way) / 6))
            along = np.outer(np.arange(steps) / steps, way)
            outside = along[abs(along).max(axis=1) >= (DOT + 0.5) * POINT]
            boxes = np.vstack((boxes, _around(anchor + outside, 1)))
        found.append((distance, end, boxes))
    return sorted(found, key=itemgetter(0))


def _around(pixels: np.ndarray, margin: float) -> np.ndarray:
    """A box around each point, with so many points of margin."""
    return np.hstack((pixels - margin * POINT, pixels + margin * POINT))


def _overlap(new: np.ndarray, old: np.ndarray) -> bool:
    """Whether any of the boxes shares pixels with any other."""
    lower, higher = new[:, None, :2] < old[:, 2:], new[:, None, 2:] > old[:, :2]
    return bool((lower & higher).all(axis=2).any())
