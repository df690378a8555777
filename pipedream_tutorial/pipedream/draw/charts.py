"""Charts: utilisation, idle time, gradient errors, memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from pipedream.draw.grids import durations_text, rank_axis, refusals
from pipedream.draw.page import (
    DPI,
    EDGE,
    LEAST,
    LINE_COLOURS,
    SMALL,
    TEXT,
    darker,
    new_figure,
    number,
    panel_title,
    percent,
    place_labels,
    save,
)
from pipedream.errors import UserError
from pipedream.schedules.catalogue import SCHEDULES, build_schedule
from pipedream.schedules.closed_forms import idle_fraction
from pipedream.schedules.policies import weight_use
from pipedream.simulate.comparison import Case, Refused, Row, closed_form, measure
from pipedream.simulate.measures import held_activations, live_versions, times_of

STEADY = "Batch after batch: each rank starts its next batch once its own work on the last is done"
MARKERS = "osD^vPX*<>hpd8H"
DASHES = ("-", "--", "-.", ":")
HOLLOW: dict[str, Any] = {"markerfacecolor": "none", "markeredgewidth": 1.8}
BEATEN: dict[str, Any] = {
    "marker": "o", "linestyle": "", "color": LINE_COLOURS[6], "markersize": 9.0,
    "markeredgecolor": EDGE, "markeredgewidth": 0.6,
}  # fmt: skip
BEST: dict[str, Any] = BEATEN | {"marker": "D", "color": LINE_COLOURS[4]}
LANE = 0.8
FLOOR = 0.4
"""Height of the largest value in a lane, and how far 0 lies below its middle; lanes are 1 apart."""

Points = dict[tuple[Fraction, Fraction], list[str]]


class IdleShares(NamedTuple):
    """Idle shares of one batch, 0 to 1."""

    microbatches: int
    makespan: Fraction
    span: Fraction


class IdleCurve(NamedTuple):
    """Idle shares of one schedule, or of several that have the same, against m."""

    titles: tuple[str, ...]
    simulated: tuple[IdleShares, ...]
    """For each number of microbatches that is allowed."""
    closed: tuple[IdleShares, ...]
    """The same by the closed forms, at more values of m, where they hold."""


def idle_curves(
    names: Sequence[str], case: Case, counts: Sequence[int], closed_counts: Sequence[int]
) -> list[IdleCurve]:
    """Idle shares simulated at `counts` and by closed form at `closed_counts`, where one holds.

    Schedules that agree everywhere share a curve.
    """
    titles: dict[tuple[tuple[IdleShares, ...], ...], list[str]] = {}
    for name in names:
        simulated = []
        closed = []
        for m in sorted({*counts, *closed_counts}):
            sized = replace(case, num_microbatches=m, num_batches=1)
            try:
                build_schedule(name, case.num_stages, m, case.chunks)
            except UserError:
                continue
            if m in counts:
                idle = measure(name, sized).batch_idle
                simulated.append(IdleShares(m, idle.makespan_fraction, idle.span_fraction))
            known = closed_form(name, sized)
            if m in closed_counts and known is not None and known[0].idle_holds(known[1]):
                form, sizes = known
                spans = sum(form.span_idle(sizes, rank) for rank in range(sizes.p))
                idles = form.makespan_idle(sizes), Fraction(spans) / sizes.p
                closed.append(IdleShares(m, *(idle_fraction(idle, sizes) for idle in idles)))
        if simulated:
            key = tuple(simulated), tuple(closed)
            titles.setdefault(key, []).append(SCHEDULES[name].title)
    return [IdleCurve(tuple(found), *curve) for curve, found in titles.items()]


def draw_utilization(found: Sequence[Row], refused: Sequence[Refused], path: Path) -> Figure:
    """Busy share of every schedule by three definitions, the least busy one on top.

    PipeDream's ways of keeping weights share a row where they are equally busy.
    """
    busy = sorted(1 - row.batch_idle.makespan_fraction for row in found)
    steady = sum(row.steady_idle == 0 for row in found)
    batch = found[0].batch.schedule
    title = (
        f"{batch.num_ranks} ranks, {batch.num_microbatches} microbatches: busy from "
        f"{percent(busy[0])} to {percent(busy[-1])} of one batch's makespan; {steady} of "
        f"{len(found)} schedules never idle when batch follows batch"
    )
    colours = LINE_COLOURS[1], LINE_COLOURS[6]
    texts = "makespan: of one batch", "span: each rank's own in one batch"
    legend: list[Artist] = [
        Patch(facecolor=colour, label=text) for text, colour in zip(texts, colours, strict=True)
    ]
    diamond: dict[str, Any] = {"marker": "D", "color": "black", "linestyle": ""}
    legend.append(Line2D([], [], label="steady: batch after batch", **diamond))
    kinds: dict[tuple[object, tuple[Fraction, ...]], list[str]] = {}
    for row in found:
        idles = row.batch_idle.makespan_fraction, row.batch_idle.span_fraction, row.steady_idle
        family = "pipedream" if row.name.startswith("pipedream") else row.name
        kinds.setdefault((family, tuple(1 - idle for idle in idles)), []).append(row.title)
    bars = sorted(
        (
            (f"{titles[0]}, all {len(titles)} kinds" if len(titles) > 1 else titles[0], shares)
            for (_, shares), titles in kinds.items()
        ),
        key=lambda bar: bar[1],
    )
    figure, (ax,) = new_figure(
        title, [0.4 * len(bars)], legend=legend, left=2.65, right=2.95, head=0.45,
        notes=[STEADY, *refusals(refused)],
    )  # fmt: skip
    beside: dict[str, Any] = {
        "transform": ax.get_yaxis_transform(), "ha": "center", "va": "center", "fontsize": SMALL,
    }  # fmt: skip
    for place, (_, shares) in enumerate(bars):
        # The span's share is never the smaller one: of its bar the end shows.
        ax.barh(place, float(shares[1]), height=0.62, color=colours[1])
        ax.barh(place, float(shares[0]), height=0.62, color=colours[0])
        ax.plot([float(shares[2])], [place], markersize=7, clip_on=False, **diamond)
        for column, share in enumerate(shares):
            ax.text(1.1 + 0.16 * column, place, percent(share), **beside)
    for column, text in enumerate(("makespan", "span", "steady")):
        ax.text(1.1 + 0.16 * column, -0.85, text, **beside)
    ax.set_yticks(range(len(bars)), [name for name, _ in bars])
    ax.set_ylim(len(bars) - 0.5, -0.5)
    ax.set_xlim(0, 1)
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_formatter(PercentFormatter(1))
    ax.set_xlabel("utilisation: share of the ranks' time spent computing", fontsize=TEXT)
    return save(figure, path)


def draw_bubble(curves: Sequence[IdleCurve], num_stages: int, path: Path) -> Figure:
    """Idle shares against the number of microbatches: closed forms as lines, simulation as
    points."""
    counts = sorted({point.microbatches for curve in curves for point in curve.simulated})
    falling = next((c for c in curves if "GPipe" in c.titles), curves[0]).simulated
    least = falling[0]
    most = falling[-1]
    title = (
        f"More microbatches, less bubble: on {num_stages} ranks GPipe idles "
        f"{percent(least.makespan)} of its makespan at m = {least.microbatches} and "
        f"{percent(most.makespan)} at m = {most.microbatches}"
    )
    notes = ["Lines: closed forms, where they hold; points: simulation"]
    figure, axes = new_figure(title, [4.8], columns=2, head=0.5, right=0.1, notes=notes)
    texts = (("makespan", "of the makespan"), ("span", "of the ranks' own spans"))
    for ax, (field, text) in zip(axes, texts, strict=True):
        for place, curve in enumerate(curves):
            for points, changed in (
                (curve.closed, {"marker": "", "linewidth": 2}),
                (curve.simulated, {"linestyle": ""}),
            ):
                xs = [point.microbatches for point in points]
                ys = [float(getattr(point, field)) for point in points]
                ax.plot(xs, ys, **_curve_style(place) | changed)
        ax.set_xscale("log", base=2)
        # On the right the curves' names need a third of the width.
        ax.set_xlim(counts[0] / 1.15, counts[-1] * (counts[-1] / counts[0]) ** 0.56)
        ax.set_xticks(counts)
        ax.minorticks_off()
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: number(x)))
        ax.set_xlabel("microbatches in a batch, m", fontsize=TEXT)
        panel_title(ax, f"Idle share {text}")
    shares = [float(v) for c in curves for s in c.simulated for v in s[1:]]
    smallest = min((share for share in shares if share > 0), default=0.1) / 1.2
    steps = [k * 10.0**-e for e in range(6) for k in (1, 2, 5)]
    ticks = [y for y in steps if smallest < y <= max(shares)]
    log_axes(axes, smallest, 0.3, [0.0] * (0 in shares) + ticks, "0%")
    for ax, (field, _) in zip(axes, texts, strict=True):
        ax.set_ylim(-0.2 * smallest if 0 in shares else smallest, 1.1 * max(shares, default=1))
        ends = [float(getattr(curve.simulated[-1], field)) for curve in curves]
        _name_curves(ax, 1.2 * counts[-1], ends, curves)
    return save(figure, path)


def log_axes(
    axes: Sequence[Axes], smallest: float, below: float, ticks: Sequence[float], zero: str
) -> None:
    """One logarithmic scale of shares for all, with 0 on a line of its own below it."""
    for ax in axes:
        ax.set_yscale("symlog", linthresh=smallest, linscale=below)
        ax.set_yticks(ticks)
        ax.minorticks_off()
        ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:g}%" if y else zero))
        ax.grid(axis="y", color="#E0E0E0")


def _curve_style(place: int) -> dict[str, Any]:
    """Colour, marker and dashes, each in turn."""
    return HOLLOW | {
        "color": LINE_COLOURS[place % len(LINE_COLOURS)],
        "marker": MARKERS[place % len(MARKERS)],
        "linestyle": DASHES[place % len(DASHES)],
        "markersize": 8,
    }


def _name_curves(ax: Axes, x: float, ends: Sequence[float], curves: Sequence[IdleCurve]) -> None:
    """Names at the right of the curves' ends, one below the other where curves end together."""
    line = 1.3 * SMALL * DPI / 72
    labels = sorted(
        (float(ax.transData.transform((x, end))[1]), "\n".join(curve.titles), place)
        for place, (end, curve) in enumerate(zip(ends, curves, strict=True))
    )
    tall = [line * (1 + text.count("\n")) for _, text, _ in labels]
    centres = np.array([y for y, _, _ in labels])
    for _ in range(500):
        for i in range(len(centres) - 1):
            push = (tall[i] + tall[i + 1]) / 2 - (centres[i + 1] - centres[i])
            if push > 0:
                centres[i : i + 2] += -push / 2, push / 2
        centres[0] = max(centres[0], ax.bbox.y0 + tall[0] / 2)
    for y, (_, text, place) in zip(centres, labels, strict=True):
        at = float(ax.transData.inverted().transform((0, y))[1])
        style: dict[str, Any] = {"fontsize": SMALL, "va": "center", "linespacing": 1.1}
        ax.text(x, at, text, color=darker(_curve_style(place)["color"]), **style)


def draw_memory_vs_bubble(found: Sequence[Row], weights: Fraction, path: Path) -> Figure:
    """Peak memory of the fullest rank against the idle share when batch follows batch.

    Memory is peak activations plus `weights` times the weight versions kept: `weights` is what a
    rank's weights weigh in units of one microbatch's activations on that rank.
    """
    places: Points = defaultdict(list)
    for row in found:
        if row.policy.stashed:
            held = zip(row.peak_activations, row.weight_copies, strict=True)
            activations, copies = max(held, key=lambda pair: pair[0] + weights * pair[1])
            text = f"{row.title} ({number(activations)} + {number(copies)})"
            places[row.steady_idle, activations + weights * copies].append(text)
    front = pareto_front(set(places))
    best = [name.rpartition(" (")[0] for point in front for name in places[point]]
    title = (
        f"Idle time against memory: for every schedule but {_listed(best)} another one is better "
        "in one and no worse in the other"
    )
    legend = [Line2D([], [], label="not beaten", **BEST), Line2D([], [], label="beaten", **BEATEN)]
    notes = [STEADY]
    wrong = [row.title for row in found if not row.policy.stashed]
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


def pareto_front(points: set[tuple[Fraction, Fraction]]) -> list[tuple[Fraction, Fraction]]:
    """Points that no other one beats or equals in both coordinates, by the first coordinate."""
    return sorted(
        (x, y)
        for x, y in points
        if not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points)
    )


def draw_activations_and_versions(found: Sequence[Row], path: Path) -> Figure:
    """Held activations as areas and kept weight versions as lines, over two batches.

    One panel a schedule, one lane a rank, all to one scale; beside a lane its two peaks.
    """
    p = found[0].batch.schedule.num_ranks
    held, fullest = max(
        ((max(row.peak_activations), row.title) for row in found), key=lambda pair: pair[0]
    )
    kept, most = max(
        ((max(row.weight_copies), row.title) for row in found), key=lambda pair: pair[0]
    )
    title = (
        f"Two batches: {fullest} holds up to {number(held)} microbatches' activations on a rank, "
        f"{most} up to {number(kept)} weight versions"
    )
    legend = [
        Patch(color=LINE_COLOURS[6], label="activations held"),
        Line2D([], [], color=LINE_COLOURS[4], linewidth=2.5, label="weight versions kept"),
    ]  # fmt: skip
    notes = [
        "Beside a rank's lane: peak activations / peak versions. All lanes have one scale",
        f"Time in units: {durations_text(found[0].stream)}",
    ]
    heights = [max(1.6, 0.58 * p)] * -(-len(found) // 2)
    figure, axes = new_figure(
        title, heights, columns=2, legend=legend, head=0.45, left=1.3, right=0.6, notes=notes
    )
    for place, (ax, row) in enumerate(zip(axes, found, strict=False)):
        ax.set_xlim(0, float(max(row.stream.makespan for row in found)))
        rank_axis(ax, p, most_times=7)
        _draw_lanes(ax, row, max(held, kept))
        panel_title(ax, row.title)
        if place % 2:
            ax.set_ylabel("")
        if place + 2 >= len(found):
            ax.set_xlabel("time", fontsize=TEXT)
    for ax in axes[len(found) :]:
        ax.remove()
    return save(figure, path)


def _draw_lanes(ax: Axes, row: Row, top: Fraction) -> None:
    """Each rank's two step functions, from its lane's floor (0) to `top`."""
    stream = row.stream
    ranks = range(stream.schedule.num_ranks)
    times = times_of(stream)
    use = weight_use(stream.schedule, row.policy, row.batch.schedule.num_microbatches)
    held = held_activations(stream.schedule, times, Fraction(0))
    kept = live_versions(stream.schedule, times, Fraction(0), use)

    def height(rank: int, value: Fraction) -> float:
        return rank + FLOOR - LANE * float(value / top)

    def curve(points: list[tuple[Fraction, Fraction]], rank: int) -> tuple[list[float], ...]:
        ys = [height(rank, value) for _, value in points]
        return [*(float(time) for time, _ in points), float(stream.makespan)], [*ys, ys[-1]]

    for rank in ranks:
        xs, ys = curve(held[rank], rank)
        ax.fill_between(xs, ys, rank + FLOOR, step="post", color=LINE_COLOURS[6], linewidth=0)
        ax.step(*curve(kept[rank], rank), where="post", color=LINE_COLOURS[4], linewidth=2)
        peaks = [number(max(value for _, value in points[rank])) for points in (held, kept)]
        ax.text(1.01, rank, " / ".join(peaks), transform=ax.get_yaxis_transform(), fontsize=SMALL,
                va="center")  # fmt: skip
        for value in (Fraction(0), top / 2, top):
            shade = "#E6E6E6" if value else "#C9C9C9"
            ax.axhline(height(rank, value), color=shade, linewidth=0.8, zorder=0)
    named = [(height(rank, value), number(value)) for rank in ranks for value in (Fraction(0), top)]
    ax.set_yticks([y for y, _ in named], [text for _, text in named], fontsize=LEAST)
    ax.set_yticks(ranks, [str(rank) for rank in ranks], minor=True)
    ax.tick_params(axis="y", which="minor", length=0, labelsize=SMALL, pad=22)
    ax.set_ylim(len(ranks) - 0.5, -0.5)
