"""What schedules keep in memory: against their idle time, and over time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from pipedream.counters import held_activations, live_versions, times_of
from pipedream.drawing import (
    GREY,
    LINE_COLOURS,
    SMALL,
    TEXT,
    new_figure,
    number,
    percent,
    rank_axis,
    save,
)
from pipedream.figure_data import Standing
from pipedream.figures import STEADY, durations_text, panel_title
from pipedream.label_placing import place_labels
from pipedream.policies import weight_use

RIGHT: dict[str, Any] = {
    "marker": "o", "linestyle": "", "color": LINE_COLOURS[1], "markersize": 9.0,
}  # fmt: skip
WRONG: dict[str, Any] = {
    "marker": "o", "linestyle": "", "color": LINE_COLOURS[4], "markersize": 13.0,
    "markerfacecolor": "none", "markeredgewidth": 2.0,
}  # fmt: skip
LANE = 0.85
"""Height of the largest value in a lane, where lanes are 1 apart."""


def draw_memory_vs_bubble(found: Sequence[Standing], weights: Fraction, path: Path) -> Figure:
    """Peak memory of the fullest rank against the idle share when batch follows batch.

    Memory is peak activations plus `weights` times the weight versions kept: `weights` is what a
    rank's weights weigh in units of one microbatch's activations on that rank.
    """
    places: dict[tuple[Fraction, Fraction], list[str]] = defaultdict(list)
    right: dict[tuple[Fraction, Fraction], str] = {}
    wrong = set()
    for one in found:
        memory, text = fullest_rank(one, weights)
        point = one.steady_idle, memory
        if one.row.policy.stashed:
            right.setdefault(point, one.row.title)
        else:
            wrong.add(point)
            text += ": wrong gradients"
        places[point].append(f"{one.row.title} {text}")
    front = pareto_front(set(right))
    title = "Best trade-offs of idle time and memory: " + _listed(
        [f"{right[point]} at {percent(point[0])} idle" for point in front]
    )
    legend = [
        Line2D([], [], label="schedule (activations + weight copies)", **RIGHT),
        Line2D([], [], label="gradients are wrong", **WRONG),
        Line2D([], [], color=GREY, linestyle="--", label="best trade-offs"),
    ]
    figure, (ax,) = new_figure(title, [6.0], legend=legend, head=0.3, left=1.05, notes=[STEADY])
    ax.set_xlim(-0.03, 1.12 * float(max(x for x, _ in places)) + 0.05)
    ax.set_ylim(0, 1.12 * float(max(y for _, y in places)) + 0.5)
    corners = [(float(x), float(y)) for x, y in front]
    xs, ys = zip(*corners, strict=True)
    ax.step(xs, ys, where="post", color=GREY, linestyle="--", zorder=1)
    for points, style in ((right, RIGHT), (wrong, WRONG)):
        ax.plot([float(x) for x, _ in points], [float(y) for _, y in points], **style)
    ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    ax.set_xlabel("idle share of the ranks' time, batch after batch", fontsize=TEXT)
    ax.set_ylabel("peak memory of the fullest rank", fontsize=TEXT)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    panel_title(
        ax,
        "Unit: one microbatch's activations on one rank; one copy of a rank's weights is "
        f"{number(weights)} of them",
    )
    labels = {(float(x), float(y)): "\n".join(names) for (x, y), names in places.items()}
    place_labels(figure, ax, labels, corners)
    return save(figure, path)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def fullest_rank(one: Standing, weights: Fraction) -> tuple[Fraction, str]:
    """(memory, '(activations + copies)') of the rank with the highest peak."""
    held = list(zip(one.row.peak_activations, one.row.weight_copies, strict=True))
    activations, copies = max(held, key=lambda pair: pair[0] + weights * pair[1])
    memory = Fraction(activations + weights * copies)
    return memory, f"({number(activations)} + {number(Fraction(copies))})"


def pareto_front(points: set[tuple[Fraction, Fraction]]) -> list[tuple[Fraction, Fraction]]:
    """Points that no other one beats or equals in both coordinates, by the first coordinate."""
    return sorted(
        (x, y)
        for x, y in points
        if not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points)
    )


def draw_activations_and_versions(found: Sequence[Standing], path: Path) -> Figure:
    """Held activations as areas and kept weight versions as lines, over two batches.

    One panel a schedule, one lane a rank, all to one scale; beside a lane its two peaks.
    """
    streams = [one.row.stream for one in found]
    p, until = found[0].row.batch.schedule.num_ranks, max(t.makespan for t in streams)
    top = max(
        max(*one.row.peak_activations, *map(Fraction, one.row.weight_copies)) for one in found
    )
    fullest = max(found, key=lambda one: max(one.row.peak_activations))
    most = max(found, key=lambda one: max(one.row.weight_copies))
    title = (
        f"Two batches: {fullest.row.title} holds up to {number(max(fullest.row.peak_activations))} "
        f"microbatches' activations on a rank, {most.row.title} up to "
        f"{number(Fraction(max(most.row.weight_copies)))} weight versions"
    )
    legend = [
        Patch(color=LINE_COLOURS[6], label="activations held"),
        Line2D([], [], color=LINE_COLOURS[4], linewidth=2.5, label="weight versions kept"),
    ]  # fmt: skip
    rows = -(-len(found) // 2)
    figure, axes = new_figure(
        title,
        [max(1.6, 0.5 * p)] * rows,
        columns=2,
        legend=legend,
        head=0.45,
        left=1.0,
        right=0.75,
        notes=[
            f"Beside a rank's lane: peak activations / peak versions; a lane is {number(top)} high",
            f"Time in units: {durations_text(streams[0])}",
        ],
    )
    for ax, one in zip(axes, found, strict=False):
        _draw_lanes(ax, one, top)
        ax.set_xlim(0, float(until))
        rank_axis(ax, p, most_times=7)
        ax.set_ylim(p - 0.5, -0.5)
        panel_title(ax, one.row.title)
        ax.set_xlabel("time", fontsize=TEXT)
    for ax in axes[: -2 if len(found) % 2 == 0 else -3]:
        ax.set_xlabel("")
    for ax in axes[len(found) :]:
        ax.remove()
    return save(figure, path)


def _draw_lanes(ax: Axes, one: Standing, top: Fraction) -> None:
    """Each rank's two step functions, from its lane's floor upwards."""
    stream, m = one.row.stream, one.row.batch.schedule.num_microbatches
    times, end = times_of(stream), stream.makespan
    held = held_activations(stream.schedule, times, Fraction(0))
    use = weight_use(stream.schedule, one.row.policy, m)
    kept = live_versions(stream.schedule, times, Fraction(0), use)

    def curve(
        points: list[tuple[Fraction, Fraction]], rank: int
    ) -> tuple[list[float], list[float]]:
        xs = [float(time) for time, _ in points] + [float(end)]
        ys = [rank + 0.45 - LANE * float(value / top) for _, value in points]
        return xs, [*ys, ys[-1]]

    for rank in range(stream.schedule.num_ranks):
        ax.axhline(rank + 0.45, color="#C9C9C9", linewidth=0.8, zorder=0)
        xs, ys = curve(held[rank], rank)
        ax.fill_between(xs, ys, rank + 0.45, step="post", color=LINE_COLOURS[6], linewidth=0)
        ax.step(*curve(kept[rank], rank), where="post", color=LINE_COLOURS[4], linewidth=2)
        peaks = [number(max(value for _, value in points[rank])) for points in (held, kept)]
        ax.text(1.01, rank, " / ".join(peaks), transform=ax.get_yaxis_transform(), fontsize=SMALL,
                va="center")  # fmt: skip
