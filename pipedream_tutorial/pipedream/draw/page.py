"""Shared parts of the pictures: the page, its colors, and labels beside points.

A page is WIDTH inches at DPI, shown about half as wide in a README, so no text is below 8 points.
Colors are those of Okabe and Ito ("Color Universal Design", 2008), with a dark green for W, so
that F, B, I and W differ in lightness too.
"""

import pathlib
import textwrap
from collections.abc import Mapping, Sequence
from itertools import product
from math import hypot
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.path import Path
from matplotlib.transforms import Bbox

WIDTH = 11.4
DPI = 150
TITLE = 15.0
TEXT = 12.5
SMALL = 11.0
LEAST = 8.0

LINE_COLORS = (
    "#000000", "#0072B2", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#56B4E9", "#6E6E6E",
)  # fmt: skip
EDGE, GRAY = "#333333", "#6E6E6E"

Color = str | tuple[float, float, float] | tuple[float, float, float, float]


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
) -> tuple[Figure, list[Axes]]:
    """Make a page: title, legend, rows of panels, lines of notes; all lengths in inches.
    `panel_heights` has one a row, `gap` lies between rows."""
    # As few lines as possible, and those about equally long.
    lines = min((textwrap.wrap(title, width) for width in range(1, 89)), key=len)
    legend_rows = -(-len(legend) // legend_columns)
    top = 0.6 + 0.29 * len(lines) + 0.33 * legend_rows
    bottom = 0.75 + 0.26 * len(notes) if notes else 0.7
    height = top + sum(panel_heights) + gap * (len(panel_heights) - 1) + bottom
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    edge = 0.2 / WIDTH
    figure.text(edge, 1 - 0.12 / height, "\n".join(lines), size=TITLE, weight="bold", va="top")
    below = "\n".join(notes)
    figure.text(edge, 0.1 / height, below, size=SMALL - 1, color=GRAY, linespacing=1.3)
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
            ax.tick_params(labelsize=SMALL, color=GRAY)
            ax.set_axisbelow(True)
            ax.spines[["top", "right"]].set_visible(False)
            ax.spines[["left", "bottom"]].set_color(GRAY)
        y -= gap
    return figure, figure.axes


def save(figure: Figure, path: pathlib.Path, source: str | None = None) -> Figure:
    """Write a PNG or SVG that is the same for the same data, and return it. A PNG's metadata
    holds `source`, the digest of what was drawn."""
    metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None, "Source": source}
    with rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(path, metadata=metadata)
    return figure


def ink(background: Color) -> str:
    """Return black or white, whichever reads better on a color."""
    red, green, blue = (c**2.2 for c in to_rgb(background))  # the light that a screen gives
    return "black" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 else "white"


def paler(color: str, share: float) -> Color:
    red, green, blue = to_rgb(color)
    return (red + share * (1 - red), green + share * (1 - green), blue + share * (1 - blue))


def panel_title(ax: Axes, text: str) -> None:
    ax.set_title(text, fontsize=TEXT, loc="left", pad=5)


Point = tuple[float, float]
POINT = DPI / 72  # pixels that a printer's point takes
DOT, CORE, GAP, FAR = 9.0, 4.0, 11, 18
"""In points: half a marker and half of its core, from a marker to its label, and from where on a
line leads there."""
SPOTS = sorted(
    product((*range(GAP, 700, 13), *range(1 - GAP, -700, -13), 0), range(-400, 401, 5)),
    key=lambda spot: hypot(*spot) + 4 * (spot[0] <= 0),
)
"""Points from a point to the nearer side of its label or, straight above and below, to its middle:
the nearest first. On the right a label reads as the point's own."""


def place_labels(ax: Axes, labels: Mapping[Point, str], avoid: Sequence[Point] = ()) -> None:
    """Write labels beside their points (data units), the rightmost first, each as near as it hides
    no point, no label, no line that leads to one, and nothing at `avoid`. A line runs below another
    point, to which it seems to lead, only where there is no other way, and below a label only then.
    The axes' limits are set before. Raises RuntimeError where there is no room."""
    pixels = ax.transData.transform
    marks = [_around(pixels(at), DOT) for at in labels]
    marks += [_around(pixels(at), 1) for at in avoid]
    boxes: list[Bbox] = []
    lines: list[Path] = []
    for point in sorted(labels, reverse=True):
        style: dict[str, Any] = {"fontsize": SMALL, "va": "center_baseline"}
        text = ax.annotate(labels[point], point, (0, 0), textcoords="offset points", **style)
        wide, high = text.get_window_extent().size
        cores = [_around(pixels(at), CORE) for at in labels if at != point]
        for uncrossed, spot in product((boxes + cores, boxes, []), SPOTS):
            side = np.sign(spot[0])
            end = pixels(point) + POINT * np.array(spot)
            box = Bbox.from_bounds(end[0] - (1 - side) / 2 * wide, end[1] - high / 2, wide, high)
            if box.count_overlaps(marks + boxes) or ax.bbox.count_contains(box.corners()) < 4:
                continue
            line = Path([pixels(point), end])
            crossed = any(other.intersects_bbox(box, filled=False) for other in lines)
            if not crossed and not any(line.intersects_bbox(b, filled=False) for b in uncrossed):
                break
        else:
            raise RuntimeError("there is no space for all labels")
        text.set(position=spot, ha={-1: "right", 0: "center", 1: "left"}[side])
        boxes.append(box)
        lines.append(line)
        if hypot(*spot) > FAR:
            ends = ax.transData.inverted().transform(line.vertices)
            ax.plot(*ends.T, color=GRAY, linewidth=0.8, zorder=1)


def _around(pixel: np.ndarray, margin: float) -> Bbox:
    """Return a box around a point with a margin in printer's points."""
    return Bbox([pixel, pixel]).padded(margin * POINT)
