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

from pipedream.draw.data import Standing
from pipedream.draw.figures import STEADY, durations_text, panel_title
from pipedream.draw.grid import rank_axis
from pipedream.draw.labels import place_labels
from pipedream.draw.page import EDGE, LEAST, LINE_COLOURS, SMALL, TEXT, new_figure, number, save
from pipedream.schedules.policies import weight_use
from pipedream.simulate.measures import held_activations, live_versions, times_of

BEATEN: dict[str, Any] = {
    "marker": "o", "linestyle": "", "color": LINE_COLOURS[6], "markersize": 9.0,
    "markeredgecolor": EDGE, "markeredgewidth": 0.6,
}  # fmt: skip
BEST: dict[str, Any] = BEATEN | {"marker": "D", "color": LINE_COLOURS[4]}
LANE, FLOOR = 0.8, 0.4
"""Height of the largest value in a lane, and how far 0 lies below its middle; lanes are 1 apart."""


def draw_memory_vs_bubble(found: Sequence[Standing], weights: Fraction, path: Path) -> Figure:
    """Peak memory of the fullest rank against the idle share when batch follows batch.

    Memory is peak activations plus `weights` times the weight versions kept: `weights` is what a
    rank's weights weigh in units of one microbatch's activations on that rank.
    """
    places: dict[tuple[Fraction, Fraction], list[str]] = defaultdict(list)
    for one in found:
        if one.row.policy.stashed:
            memory, text = fullest_rank(one, weights)
            places[one.steady_idle, memory].append(f"{one.row.title} {text}")
    front = pareto_front(set(places))
    best = [name.rpartition(" (")[0] for point in front for name in places[point]]
    title = (
        f"Idle time against memory: for every schedule but {_listed(best)} another one is better "
        "in one and no worse in the other"
    )
    legend = [Line2D([], [], label="not beaten", **BEST), Line2D([], [], label="beaten", **BEATEN)]
    notes = [STEADY]
    wrong = [one.row.title for one in found if not one.row.policy.stashed]
    if wrong:
        notes.append(f"Left out, because its gradients are wrong: {_listed(wrong)}")
    figure, (ax,) = new_figure(title, [5.6], legend=legend, head=0.3, left=1.05, notes=notes)
    ax.set_xlim(-0.03, 1.12 * float(max(x for x, _ in places)) + 0.05)
    ax.set_ylim(0, 1.12 * float(max(y for _, y in places)) + 0.5)
    for points, style in (([at for at in places if at not in front], BEATEN), (front, BEST)):
        ax.plot([float(x) for x, _ in points], [float(y) for _, y in points], **style)
    ax.grid(color="#E6E6E6")
    ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    ax.set_xlabel("idle share of the ranks' time, batch after batch", fontsize=TEXT)
    ax.set_ylabel("peak memory of the fullest rank", fontsize=TEXT)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    panel_title(
        ax,
        "(activations + weight copies), in one microbatch's activations on a rank; a copy of its "
        f"weights is {number(weights)}",
    )
    labels = {(float(x), float(y)): "\n".join(names) for (x, y), names in places.items()}
    place_labels(figure, ax, labels)
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
        [max(1.6, 0.58 * p)] * rows,
        columns=2,
        legend=legend,
        head=0.45,
        left=1.3,
        right=0.6,
        notes=[
            "Beside a rank's lane: peak activations / peak versions. All lanes have one scale",
            f"Time in units: {durations_text(streams[0])}",
        ],
    )
    for ax, one in zip(axes, found, strict=False):
        _draw_lanes(ax, one, top)
        ax.set_xlim(0, float(until))
        rank_axis(ax, p, most_times=7)
        _lane_axis(ax, p, top)
        panel_title(ax, one.row.title)
        ax.set_xlabel("time", fontsize=TEXT)
    for ax in axes[1::2]:
        ax.set_ylabel("")
    for ax in axes[: -2 if len(found) % 2 == 0 else -3]:
        ax.set_xlabel("")
    for ax in axes[len(found) :]:
        ax.remove()
    return save(figure, path)


def _lane_axis(ax: Axes, num_ranks: int, top: Fraction) -> None:
    """Each lane's own scale from 0 to `top`, with a line at both and half-way."""
    values = [Fraction(0), top / 2, top]
    ticks = [(rank + FLOOR - LANE * float(v / top), v) for rank in range(num_ranks) for v in values]
    for y, value in ticks:
        ax.axhline(y, color="#C9C9C9" if value == 0 else "#E6E6E6", linewidth=0.8, zorder=0)
    named = [(y, number(value)) for y, value in ticks if value != top / 2]
    ax.set_yticks([y for y, _ in named], [text for _, text in named], fontsize=LEAST)
    ax.set_yticks(range(num_ranks), [str(rank) for rank in range(num_ranks)], minor=True)
    ax.tick_params(axis="y", which="minor", length=0, labelsize=SMALL, pad=22)
    ax.set_ylim(num_ranks - 0.5, -0.5)


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
        ys = [rank + FLOOR - LANE * float(value / top) for _, value in points]
        return xs, [*ys, ys[-1]]

    for rank in range(stream.schedule.num_ranks):
        xs, ys = curve(held[rank], rank)
        ax.fill_between(xs, ys, rank + FLOOR, step="post", color=LINE_COLOURS[6], linewidth=0)
        ax.step(*curve(kept[rank], rank), where="post", color=LINE_COLOURS[4], linewidth=2)
        peaks = [number(max(value for _, value in points[rank])) for points in (held, kept)]
        ax.text(1.01, rank, " / ".join(peaks), transform=ax.get_yaxis_transform(), fontsize=SMALL,
                va="center")  # fmt: skip
