"""Charts: utilisation, idle time against microbatches, gradient errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from pipedream.comparison import Refused
from pipedream.drawing import LINE_COLOURS, SMALL, TEXT, new_figure, number, percent, save
from pipedream.figure_data import IdleCurve, Standing
from pipedream.figures import STEADY, panel_title, refusals

MARKERS = "osD^vPX*<>hp"
DASHES = ("-", "--", "-.", ":")


def draw_utilization(found: Sequence[Standing], refused: Sequence[Refused], path: Path) -> Figure:
    """Busy share of every schedule by three definitions, in the order in which they are given."""
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
    figure, (ax,) = new_figure(
        title, [0.46 * len(found)], legend=legend, left=2.65, right=2.95, head=0.45,
        notes=[STEADY, *refusals(refused)],
    )  # fmt: skip
    for place, one in enumerate(found):
        shares = [
            1 - one.row.batch_idle.makespan_fraction,
            1 - one.row.batch_idle.span_fraction,
            1 - one.steady_idle,
        ]
        for side, (share, (_, colour)) in enumerate(zip(shares, bars, strict=False)):
            ax.barh(place - 0.19 + 0.38 * side, float(share), height=0.36, color=colour)
        ax.plot([float(shares[2])], [place], "D", color="black", markersize=7, clip_on=False)
        for column, share in enumerate(shares):
            _right_of(ax, 1.1 + 0.16 * column, place, percent(share))
    for column, text in enumerate(("makespan", "span", "steady")):
        _right_of(ax, 1.1 + 0.16 * column, -0.85, text)
    ax.set_yticks(range(len(found)), [one.row.title for one in found])
    ax.set_ylim(len(found) - 0.5, -0.5)
    ax.set_xlim(0, 1)
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_formatter(PercentFormatter(1))
    ax.set_xlabel("utilisation: share of the ranks' time spent computing", fontsize=TEXT)
    return save(figure, path)


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
    styles: list[dict[str, Any]] = [
        {
            "color": LINE_COLOURS[i % len(LINE_COLOURS)],
            "marker": MARKERS[i % len(MARKERS)],
            "linestyle": DASHES[i % len(DASHES)],
            "markersize": 8,
            "markerfacecolor": "none",
            "markeredgewidth": 1.8,
        }
        for i in range(len(curves))
    ]
    legend = [
        Line2D([], [], label=" = ".join(curve.titles), linewidth=2, **style)
        for curve, style in zip(curves, styles, strict=True)
    ]
    figure, axes = new_figure(
        title,
        [4.3],
        columns=2,
        legend=legend,
        legend_columns=4,
        head=0.5,
        right=0.25,
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
        ax.set_xlim(min(counts) / 1.15, max(counts) * 1.15)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: number(x)))
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        ax.set_ylim(
            -0.03, 1.05 * max(float(s.makespan) for c in curves for s in c.simulated) + 0.02
        )
        ax.grid(axis="y", color="#E0E0E0")
        ax.set_xlabel("microbatches in a batch, m", fontsize=TEXT)
        panel_title(ax, f"Idle share {text}")
    return save(figure, path)


def draw_gradient_error(rows: Sequence[Mapping[str, Any]], path: Path) -> Figure:
    """How wrong gradients are without weight stashing, against learning rate, depth and stage.

    A row has num_stages, learning_rate, mode (a schedule's name), median_relative_error and
    per_stage (a list of such errors); None where training diverged. Errors of exactly 0, which a
    logarithmic axis cannot show, are drawn on a line of their own below it.
    """
    wrong = [row for row in rows if row["mode"] == "pipedream-no-stash"]
    right = [row for row in rows if row["mode"] == "pipedream"]
    numbers = [row for row in wrong if row["median_relative_error"] is not None]
    high = max(numbers, key=lambda row: row["median_relative_error"])
    low = min(numbers, key=lambda row: row["median_relative_error"])
    largest = max((row["median_relative_error"] or 0 for row in right), default=0)
    title = (
        f"Without stashing gradients are off by {100 * low['median_relative_error']:.2g}% (p = "
        f"{low['num_stages']}, learning rate {low['learning_rate']:g}) to "
        f"{100 * high['median_relative_error']:.2g}% (p = {high['num_stages']}, learning rate "
        f"{high['learning_rate']:g}); with stashing by "
        f"{'exactly 0' if largest == 0 else f'{100 * largest:.2g}% at most'}"
    )
    depths = sorted({row["num_stages"] for row in rows})
    legend = [
        Line2D([], [], linewidth=2, label=f"p = {p}", **_depth_style(i))
        for i, p in enumerate(depths)
    ]
    figure, axes = new_figure(title, [4.4], columns=2, legend=legend, head=0.5, left=1.4)
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
    rates = sorted({row["learning_rate"] for row in numbers})
    rate = rates[len(rates) // 2]
    for row in numbers:
        if row["learning_rate"] == rate:
            points = list(enumerate(row["per_stage"]))
            _error_line(axes[1], points, "-", depths.index(row["num_stages"]))
    axes[1].xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[1].set_xlabel("stage (the last one sees no update in between)", fontsize=TEXT)
    panel_title(axes[1], f"By stage, without stashing, learning rate {rate:g}")
    for ax in axes:
        _error_axis(ax)
    axes[0].set_ylabel("relative error of the gradient, median", fontsize=TEXT)
    return save(figure, path)


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


def _error_axis(ax: Axes) -> None:
    """Logarithmic above the smallest error that is not 0, with room for 0 itself below."""
    drawn = np.concatenate([np.asarray(line.get_ydata(), float) for line in ax.get_lines()])
    errors = drawn[drawn > 0]
    smallest = 10.0 ** math.floor(math.log10(errors.min()))
    ax.set_yscale("symlog", linthresh=smallest, linscale=0.6)
    powers = [
        10.0**k for k in range(round(math.log10(smallest)), 1 + math.ceil(math.log10(errors.max())))
    ]
    ax.set_ylim(-0.3 * smallest, 1.5 * errors.max())
    ax.set_yticks([0.0, *(p for p in powers if p <= errors.max())])
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: "exactly 0" if y == 0 else f"{y:g}"))
    ax.minorticks_off()
    ax.grid(axis="y", color="#E0E0E0")
