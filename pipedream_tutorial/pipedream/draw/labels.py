"""Labels beside points, so that none hides another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipedream.draw.page import DPI, GREY, SMALL

Point = tuple[float, float]
Box = tuple[float, float, float, float]
"""Left, low, right, high in pixels."""
DOT, GAP, FAR = 9.0, 11.0, 18.0
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
    taken, placed = list(obstacles), {}
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
        near, low = x + left * unit, y + up * unit - height / 2
        box = (near, low, near + width, low + height)
        end = (min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3]))
        distance = float(np.hypot(end[0] - x, end[1] - y)) / unit
        if left < 0:
            distance += 4  # on the right a label reads as the point's own
        found.append(Spot(distance, box, ((x, y), end) if distance > FAR else None))
    return sorted(found, key=lambda spot: spot.distance)
