"""The picture of search: how long a batch takes against the memory that it may take."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from pipedream.draw.figures import panel_title
from pipedream.draw.labels import place_labels
from pipedream.draw.memory import BEATEN
from pipedream.draw.page import LINE_COLOURS, TEXT, new_figure, number
from pipedream.draw.steps import row_of

FIXED = ("gpipe", "1f1b", "eager-1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")
CURVE: dict[str, Any] = {
    "color": LINE_COLOURS[4],
    "marker": "D",
    "markersize": 6,
    "linewidth": 2,
    "drawstyle": "steps-post",
}


def fixed_points(communication: int) -> dict[tuple[Fraction, Fraction], list[str]]:
    """(microbatches held on the fullest rank, makespan) -> titles of the schedules there."""
    found: dict[tuple[Fraction, Fraction], list[str]] = defaultdict(list)
    for name in FIXED:
        row = row_of(name, communication=communication)
        found[max(row.peak_activations), row.batch.makespan].append(row.title)
    return found


def draw_frontier(record: Mapping[str, Any], path: Path) -> Figure:
    """Fixed schedules as points, search as the curve; a panel for each time to send."""
    proved = all(row["makespan"] == row["lower_bound"] for row in record["rows"])
    least = "the shortest there is, proved" if proved else "the shortest found"
    figure, axes = new_figure(
        f"{record['num_stages']} ranks, {record['num_microbatches']} microbatches: with "
        "communication memory buys time, and search finds what lies between ZB-H1 and ZB-H2",
        [4.6],
        columns=2,
        legend=[
            Line2D([], [], label=f"search: {least} (one stage a rank)", **CURVE),
            Line2D([], [], label="fixed schedules", **BEATEN),
        ],
        head=0.5,
        notes=["F = I = W = 1 on every rank; two stages a rank may beat one: ZB-V does at c = 0"],
    )
    times = sorted({row["communication"] for row in record["rows"]})
    for ax, communication in zip(axes, times, strict=True):
        rows = [
            row
            for row in record["rows"]
            if row["communication"] == communication and row["memory"] > 2
        ]
        curve = [(row["memory"], Fraction(row["makespan"])) for row in rows]
        points = fixed_points(communication)
        ax.plot([x for x, _ in curve], [float(y) for _, y in curve], **CURVE)
        ax.plot([float(x) for x, _ in points], [float(y) for _, y in points], **BEATEN)
        top = 1.04 * float(max(y for _, y in points))
        ax.set_ylim(0.9 * float(min(y for _, y in (*curve, *points))), 1.12 * top)
        ax.set_xlim(2.5, max(x for x, _ in curve) + 1.2)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_xlabel("activations held on the fullest rank, microbatches", fontsize=TEXT)
        ax.grid(color="#E6E6E6")
        named = {(float(x), float(y)): ", ".join(names) for (x, y), names in points.items()}
        line = [
            (float(x), y)
            for (left, high), (right, low) in pairwise((x, float(y)) for x, y in curve)
            for x, y in [
                *((x, high) for x in np.linspace(left, right, 20)),
                *((right, y) for y in np.linspace(low, high, 20)),
            ]
        ]
        place_labels(figure, ax, named, avoid=line)
        panel_title(ax, f"Communication c = {number(Fraction(communication))}")
    axes[0].set_ylabel("time of one batch", fontsize=TEXT)
    figure.savefig(path, metadata={"Software": None, "Source": digest(record)})
    return figure


def digest(record: Mapping[str, Any]) -> str:
    """Of all that is drawn."""
    drawn = [record["rows"], [[str(fixed_points(c))] for c in (0, 1)]]
    return hashlib.sha256(json.dumps(drawn).encode()).hexdigest()
