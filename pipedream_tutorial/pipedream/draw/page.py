"""Define the shared parts of pictures: the page, its colors, and labels beside points.

A page is usually WIDTH inches wide, at DPI dots per inch. A README shows it at about half this
width, so no text is smaller than 8 points. The colors are from Okabe and Ito ("Color Universal
Design", 2008), except the dark green of W. Because W is dark, F, B, I and W also differ in
lightness.
"""

import pathlib
import textwrap
from collections.abc import Mapping, Sequence
from itertools import product
from math import hypot
from typing import Any

import numpy as np
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
MIN_FONT_SIZE = 8.0

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
    full_width: float = WIDTH,
    left: float = 0.95,
    right: float = 0.4,
    gap: float = 0.75,
) -> tuple[Figure, list[Axes]]:
    """Create a page with a title, a legend, rows of panels and lines of notes. All lengths are in
    inches. `panel_heights` contains the height of each row, and `gap` is the distance between
    rows."""
    # Use as few lines as possible, of about equal length.
    lines = min((textwrap.wrap(title, width) for width in range(1, int(7.8 * full_width))), key=len)
    legend_rows = -(-len(legend) // legend_columns)
    top = 0.6 + 0.29 * len(lines) + 0.33 * legend_rows
    bottom = 0.75 + 0.26 * len(notes) if notes else 0.7
    height = top + sum(panel_heights) + gap * (len(panel_heights) - 1) + bottom
    figure = Figure(figsize=(full_width, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    edge = 0.2 / full_width
    figure.text(edge, 1 - 0.12 / height, "\n".join(lines), size=TITLE, weight="bold", va="top")
    notes_text = "\n".join(notes)
    figure.text(edge, 0.1 / height, notes_text, size=SMALL - 1, color=GRAY, linespacing=1.3)
    if legend:
        figure.legend(
            handles=list(legend), ncols=min(legend_columns, len(legend)), loc="upper left",
            bbox_to_anchor=(edge, 1 - (0.17 + 0.29 * len(lines)) / height), fontsize=SMALL,
            frameon=False, borderaxespad=0.0, borderpad=0.2, columnspacing=1.6, handlelength=1.6,
        )  # fmt: skip
    width = (full_width - left - right - (columns - 1) * left) / columns
    y = height - top
    for panel_height in panel_heights:
        y -= panel_height
        for column in range(columns):
            x = left + column * (width + left)
            size = width / full_width, panel_height / height
            ax = figure.add_axes((x / full_width, y / height, *size))
            ax.tick_params(labelsize=SMALL, color=GRAY)
            ax.set_axisbelow(True)
            ax.spines[["top", "right"]].set_visible(False)
            ax.spines[["left", "bottom"]].set_color(GRAY)
        y -= gap
    return figure, figure.axes


def save(figure: Figure, path: pathlib.Path, source: str | None = None) -> Figure:
    """Save a figure as PNG, and return the figure. Equal data gives identical files. The metadata
    contains `source`, the digest of the plotted data."""
    figure.savefig(path, metadata={"Software": None, "Source": source})
    return figure


def contrast_color(background: Color) -> str:
    """Return black or white, whichever is easier to read on `background`."""
    red, green, blue = (c**2.2 for c in to_rgb(background))  # light intensity on a screen
    return "black" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 else "white"


def lighten(color: str, share: float) -> Color:
    red, green, blue = to_rgb(color)
    return (red + share * (1 - red), green + share * (1 - green), blue + share * (1 - blue))


def panel_title(ax: Axes, text: str) -> None:
    ax.set_title(text, fontsize=TEXT, loc="left", pad=5)


Point = tuple[float, float]
PIXELS_PER_POINT = DPI / 72
MARKER_RADIUS, CORE_RADIUS, LABEL_GAP, LEADER_DISTANCE = 9.0, 4.0, 11, 18
"""Lengths in points: the radius of a marker, the radius of its core, the distance from a marker to
its label, and the distance beyond which a line connects the marker and the label."""
LABEL_OFFSETS = sorted(
    product((*range(LABEL_GAP, 700, 13), *range(1 - LABEL_GAP, -700, -13), 0), range(-400, 401, 5)),
    key=lambda spot: hypot(*spot) + 4 * (spot[0] <= 0),
)
"""Offsets, in typographic points, from a marker to the nearer side of its label, nearest first. For
a label directly above or below the marker, the offset is measured to the middle of the label.
Offsets that are not to the right count as 4 points longer, because readers most easily associate a
label with the marker on its left."""


def place_labels(ax: Axes, labels: Mapping[Point, str], avoid: Sequence[Point] = ()) -> None:
    """Write each label beside its point, starting with the rightmost point. If a label is far from
    its point, connect the two with a line. Points are in data units. Labels are as near to their
    points as possible, but hide no point, no other label, no line, and no point in `avoid`. A line
    crosses another point or label only if there is no alternative, because readers could think that
    the line ends there. Set the axis limits before the call. Raises RuntimeError if there is no
    space."""
    pixels = ax.transData.transform
    marks = [_box_around(pixels(at), MARKER_RADIUS) for at in labels]
    marks += [_box_around(pixels(at), 1) for at in avoid]
    boxes: list[Bbox] = []
    lines: list[Path] = []
    for point in sorted(labels, reverse=True):
        style: dict[str, Any] = {"fontsize": SMALL, "va": "center_baseline"}
        text = ax.annotate(labels[point], point, (0, 0), textcoords="offset points", **style)
        text_width, text_height = text.get_window_extent().size
        cores = [_box_around(pixels(at), CORE_RADIUS) for at in labels if at != point]
        for obstacles, offset in product((boxes + cores, boxes, []), LABEL_OFFSETS):
            side = np.sign(offset[0])
            end = pixels(point) + PIXELS_PER_POINT * np.array(offset)
            box = Bbox.from_bounds(
                end[0] - (1 - side) / 2 * text_width,
                end[1] - text_height / 2,
                text_width,
                text_height,
            )
            if box.count_overlaps(marks + boxes) or ax.bbox.count_contains(box.corners()) < 4:
                continue
            line = Path([pixels(point), end])
            crossed = any(other.intersects_bbox(box, filled=False) for other in lines)
            if not crossed and not any(line.intersects_bbox(b, filled=False) for b in obstacles):
                break
        else:
            raise RuntimeError("there is no space for all labels")
        text.set(position=offset, ha={-1: "right", 0: "center", 1: "left"}[side])
        boxes.append(box.padded(PIXELS_PER_POINT))  # a label is drawn up to a pixel larger
        lines.append(line)
        if hypot(*offset) > LEADER_DISTANCE:
            line_ends = ax.transData.inverted().transform(line.vertices)
            ax.plot(*line_ends.T, color=GRAY, linewidth=0.8, zorder=1)


def _box_around(pixel: np.ndarray, margin: float) -> Bbox:
    """Return a box that extends `margin` typographic points from a pixel in every direction."""
    return Bbox([pixel, pixel]).padded(margin * PIXELS_PER_POINT)
