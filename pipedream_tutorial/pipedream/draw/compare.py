"""Charts: utilisation, idle time against microbatches, gradient errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from pipedream.draw.data import IdleCurve, Standing
from pipedream.draw.figures import STEADY, panel_title, refusals
from pipedream.draw.page import (
    DPI,
    LINE_COLOURS,
    SMALL,
    TEXT,
    darker,
    new_figure,
    number,
    percent,
    save,
)
from pipedream.simulate.comparison import Refused

MARKERS = "osD^vPX*<>hp"
DASHES = ("-", "--", "-.", ":")


def draw_utilization(found: Sequence[Standing], refused: Sequence[Refused], path: Path) -> Figure:
    """Busy share of every schedule by three definitions, the least busy one on top.

    PipeDream's ways of keeping weights share a row where they are equally busy.
    """
    best = max(1 - one.row.batch_idle.makespan_fraction for one in found)
    worst = min(found, key=lambda one: 1 - one.row.batch_idle.makespan_fraction)
    steady = [one.row.title for one in found if one.steady_idle == 0]
    batch = found[0].row.batch.schedule
    title = (
        f"{batch.num_ranks} ranks, {batch.num_microbatches} microbatches: busy from "
        f"{percent(1 - worst.row.batch_idle.makespan_fraction)} to {percent(best)} of one batch's "
        f"makespan; {len(steady)} of {len(found)} schedules never idle when batch follows batch"
    )
    bars = (
        ("makespan: of one batch", LINE_COLOURS[1]),
        ("span: each rank's own in one batch", LINE_COLOURS[6]),
    )
    legend: list[Artist] = [Patch(facecolor=colour, label=text) for text, colour in bars]
    legend.append(
        Line2D([], [], marker="D", color="black", linestyle="", label="steady: batch after batch")
    )
    rows = _utilization_rows(found)
    figure, (ax,) = new_figure(
        title, [0.4 * len(rows)], legend=legend, left=2.65, right=2.95, head=0.45,
        notes=[STEADY, *refusals(refused)],
    )  # fmt: skip
    for place, (_, shares) in enumerate(rows):
        # The span's share is never the smaller one: of its bar the end shows.
        for share, (_, colour) in reversed(list(zip(shares, bars, strict=False))):
            ax.barh(place, float(share), height=0.62, color=colour)
        ax.plot([float(shares[2])], [place], "D", color="black", markersize=7, clip_on=False)
        for column, share in enumerate(shares):
            _right_of(ax, 1.1 + 0.16 * column, place, percent(share))
    for column, text in enumerate(("makespan", "span", "steady")):
        _right_of(ax, 1.1 + 0.16 * column, -0.85, text)
    ax.set_yticks(range(len(rows)), [name for name, _ in rows])
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_xlim(0, 1)
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_formatter(PercentFormatter(1))
    ax.set_xlabel("utilisation: share of the ranks' time spent computing", fontsize=TEXT)
    return save(figure, path)


def _utilization_rows(found: Sequence[Standing]) -> list[tuple[str, tuple[Fraction, ...]]]:
    """(name, busy shares of makespan, span and steady state), the least busy first."""
    rows: dict[tuple[object, tuple[Fraction, ...]], list[str]] = {}
    for one in found:
        idle = one.row.batch_idle
        shares = (1 - idle.makespan_fraction, 1 - idle.span_fraction, 1 - one.steady_idle)
        family = "pipedream" if one.row.name.startswith("pipedream") else one.row.name
        rows.setdefault((family, shares), []).append(one.row.title)
    named = [
        (titles[0] + (f", all {len(titles)} kinds" if len(titles) > 1 else ""), shares)
        for (_, shares), titles in rows.items()
    ]
    return sorted(named, key=lambda row: row[1])


def _right_of(ax: Axes, x: float, y: float, text: str) -> None:
    """Text in a column beside the panel: x in panel widths, y in data units."""
    ax.text(
        x, y, text, transform=ax.get_yaxis_transform(), ha="center", va="center", fontsize=SMALL
    )


def draw_bubble(curves: Sequence[IdleCurve], num_stages: int, path: Path) -> Figure:
    """Idle shares against the number of microbatches: closed forms as lines, simulation as
    points."""
    counts = [point.microbatches for curve in curves for point in curve.simulated]
    falling = next((c for c in curves if "GPipe" in c.titles), curves[0]).simulated
    least, most = falling[0], falling[-1]
    title = (
        f"More microbatches, less bubble: on {num_stages} ranks GPipe idles "
        f"{percent(least.makespan)} of its makespan at m = {least.microbatches} and "
        f"{percent(most.makespan)} at m = {most.microbatches}"
    )
    styles = _curve_styles(len(curves))
    figure, axes = new_figure(
        title,
        [4.8],
        columns=2,
        head=0.5,
        right=0.1,
        notes=["Lines: closed forms, where they hold; points: simulation"],
    )
    texts = (("makespan", "of the makespan"), ("span", "of the ranks' own spans"))
    for ax, (field, text) in zip(axes, texts, strict=True):
        for curve, style in zip(curves, styles, strict=True):
            for points, changed in (
                (curve.closed, {"marker": "", "linewidth": 2}),
                (curve.simulated, {"linestyle": ""}),
            ):
                xs = [point.microbatches for point in points]
                ax.plot(xs, [float(getattr(point, field)) for point in points], **style | changed)
        ax.set_xscale("log", base=2)
        # On the right the curves' names need a third of the width.
        ax.set_xlim(min(counts) / 1.15, max(counts) * (max(counts) / min(counts)) ** 0.56)
        ax.set_xticks(sorted(set(counts)))
        ax.minorticks_off()
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: number(x)))
        ax.set_xlabel("microbatches in a batch, m", fontsize=TEXT)
        panel_title(ax, f"Idle share {text}")
    _idle_axes(axes, [float(v) for c in curves for s in c.simulated for v in s[1:]])
    for ax, (field, _) in zip(axes, texts, strict=True):
        ends = [float(getattr(curve.simulated[-1], field)) for curve in curves]
        _name_curves(ax, 1.2 * max(counts), ends, curves, styles)
    return save(figure, path)


def _curve_styles(count: int) -> list[dict[str, Any]]:
    """Colour, marker and dashes, each in turn."""
    return [
        {
            "color": LINE_COLOURS[i % len(LINE_COLOURS)],
            "marker": MARKERS[i % len(MARKERS)],
            "linestyle": DASHES[i % len(DASHES)],
            "markersize": 8,
            "markerfacecolor": "none",
            "markeredgewidth": 1.8,
        }
        for i in range(count)
    ]


def _idle_axes(axes: Sequence[Axes], shares: Sequence[float]) -> None:
    """One logarithmic scale for all, with a line for 0 below where some share is 0."""
    smallest = min((share for share in shares if share > 0), default=0.1) / 1.2
    steps = [k * 10.0**-e for e in range(6) for k in (1, 2, 5)]
    for ax in axes:
        ax.set_yscale("symlog", linthresh=smallest, linscale=0.3)
        ax.set_ylim(-0.2 * smallest if 0 in shares else smallest, 1.1 * max(shares, default=1))
        ax.set_yticks([0.0] * (0 in shares) + [y for y in steps if smallest < y <= max(shares)])
        ax.minorticks_off()
        ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:g}%"))
        ax.grid(axis="y", color="#E0E0E0")


def _name_curves(
    ax: Axes,
    x: float,
    ends: Sequence[float],
    curves: Sequence[IdleCurve],
    styles: Sequence[Mapping[str, Any]],
) -> None:
    """Names at the right of the curves' ends, one below the other where curves end together."""
    line = 1.3 * SMALL * DPI / 72
    labels = sorted(
        (float(ax.transData.transform((x, end))[1]), "\n".join(curve.titles), style["color"])
        for end, curve, style in zip(ends, curves, styles, strict=True)
    )
    tall = [line * (1 + text.count("\n")) for _, text, _ in labels]
    centres = np.array([y for y, _, _ in labels])
    for _ in range(500):
        for i in range(len(centres) - 1):
            push = (tall[i] + tall[i + 1]) / 2 - (centres[i + 1] - centres[i])
            if push > 0:
                centres[i : i + 2] += -push / 2, push / 2
        centres[0] = max(centres[0], ax.bbox.y0 + tall[0] / 2)
    for y, (_, text, colour) in zip(centres, labels, strict=True):
        at = float(ax.transData.inverted().transform((0, y))[1])
        ax.text(x, at, text, color=darker(colour), fontsize=SMALL, va="center", linespacing=1.1)


def draw_gradient_error(rows: Sequence[Mapping[str, Any]], path: Path) -> Figure:
    """How wrong gradients are without weight stashing, against learning rate, depth and stage.

    A row has num_stages, learning_rate, mode (a schedule's name), median_relative_error and
    per_stage (a list of such errors); None where training diverged. Errors of exactly 0, which a
    logarithmic axis cannot show, are drawn on a line of their own below it.
    """
    wrong = [row for row in rows if row["mode"] == "pipedream-no-stash"]
    right = [row for row in rows if row["mode"] == "pipedream"]
    numbers = [row for row in wrong if row["median_relative_error"] is not None]
    depths = sorted({row["num_stages"] for row in rows})
    title = _error_title(numbers, right)
    figure, axes = new_figure(title, [4.6], columns=2, head=0.5, left=1.4, right=0.3)
    for i, p in enumerate(depths):
        for group, dashes in ((wrong, "-"), (right, ":")):
            points = [
                (row["learning_rate"], row["median_relative_error"])
                for row in group
                if row["num_stages"] == p
            ]
            _error_line(axes[0], sorted(points), dashes, i)
    axes[0].set_xscale("log")
    axes[0].xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes[0].set_xlabel("learning rate (of a batch)", fontsize=TEXT)
    panel_title(axes[0], "All stages: without stashing, and with (dotted)")
    for i, p in enumerate(depths):
        known = [
            (row["learning_rate"], row["median_relative_error"])
            for row in numbers
            if row["num_stages"] == p
        ]
        if known:
            _name_line(axes[0], max(known), f"p = {p}", i)
    rates = sorted({row["learning_rate"] for row in numbers})
    rate = rates[len(rates) // 2]
    for row in numbers:
        if row["learning_rate"] == rate:
            points = list(enumerate(row["per_stage"]))
            depth = depths.index(row["num_stages"])
            _error_line(axes[1], points, "-", depth)
            _name_line(axes[1], points[0], f"p = {row['num_stages']}", depth)
    axes[1].xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[1].set_xlabel("stage (the last one sees no update in between)", fontsize=TEXT)
    panel_title(axes[1], f"By stage, without stashing, learning rate {rate:g}")
    axes[1].set_xlim(-0.3, 0.3 + max(depths) - 1)
    _error_axes(axes)
    axes[0].set_ylabel("relative error of the gradient, median", fontsize=TEXT)
    return save(figure, path)


def _error_title(numbers: Sequence[Mapping[str, Any]], right: Sequence[Mapping[str, Any]]) -> str:
    """The smallest and the largest error without stashing, and the largest with it."""
    high = max(numbers, key=lambda row: row["median_relative_error"])
    low = min(numbers, key=lambda row: row["median_relative_error"])
    largest = max((row["median_relative_error"] or 0 for row in right), default=0)
    return (
        f"Without stashing gradients are off by {100 * low['median_relative_error']:.2g}% (p = "
        f"{low['num_stages']}, learning rate {low['learning_rate']:g}) to "
        f"{100 * high['median_relative_error']:.2g}% (p = {high['num_stages']}, learning rate "
        f"{high['learning_rate']:g}); with stashing by "
        f"{'exactly 0' if largest == 0 else f'{100 * largest:.2g}% at most'}"
    )


def _error_line(
    ax: Axes, points: Sequence[tuple[float, float | None]], dashes: str, place: int
) -> None:
    """One line; points without a number (training had diverged) are left out."""
    known = [(x, error) for x, error in points if error is not None]
    xs, errors = [x for x, _ in known], [error for _, error in known]
    ax.plot(xs, errors, linestyle=dashes, linewidth=2, **_depth_style(place))


def _depth_style(place: int) -> dict[str, Any]:
    """Markers that stay visible where the lines of all depths lie on each other."""
    return {
        "color": LINE_COLOURS[1 + place % 7],
        "marker": MARKERS[place % len(MARKERS)],
        "markerfacecolor": "none",
        "markeredgewidth": 1.8,
        "markersize": max(5.0, 12.0 - 2 * place),
    }


def _name_line(ax: Axes, point: tuple[float, float], text: str, place: int) -> None:
    """The line's name, to the right of one of its points."""
    ax.annotate(
        text, point, xytext=(9, 2), textcoords="offset points", fontsize=SMALL,
        color=darker(_depth_style(place)["color"]), fontweight="bold",
    )  # fmt: skip


def _error_axes(axes: Sequence[Axes]) -> None:
    """One scale for all: logarithmic above the smallest error that is not 0, 0 itself below."""
    lines = [line for ax in axes for line in ax.get_lines()]
    drawn = np.concatenate([np.asarray(line.get_ydata(), float) for line in lines])
    errors = drawn[drawn > 0]
    smallest = 10.0 ** math.floor(math.log10(errors.min()))
    top = math.ceil(math.log10(errors.max()))
    powers = [10.0**k for k in range(round(math.log10(smallest)), 1 + top)]
    for ax in axes:
        ax.set_yscale("symlog", linthresh=smallest, linscale=0.6)
        ax.set_ylim(-0.3 * smallest, 1.5 * errors.max())
        ax.set_yticks([0.0, *(p for p in powers if p <= errors.max())])
        ax.yaxis.set_major_formatter(
            FuncFormatter(lambda y, _: "exactly 0" if y == 0 else f"{100 * y:g}%")
        )
        ax.minorticks_off()
        ax.grid(axis="y", color="#E0E0E0")
