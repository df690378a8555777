"""Draw the pictures on the tutorial's pages: timelines, held activations, the best micro-batch
size, the search frontier, simulation errors, memory per rank, and gradient errors."""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import checkout  # noqa: F401
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter
from pipedream.__main__ import CONFIG
from pipedream.draw.charts import DOMINATED_STYLE, HOLLOW_MARKER, MARKERS, log_axis
from pipedream.draw.grids import (
    ROW,
    Panel,
    draw_grid,
    durations_text,
    grid_height,
    idle_text,
    kind_legend,
    lay_out,
    rank_axis,
)
from pipedream.draw.page import (
    GRAY,
    LINE_COLORS,
    SMALL,
    TEXT,
    new_figure,
    panel_title,
    place_labels,
    save,
)
from pipedream.schedules.ops import transfers
from pipedream.simulate.comparison import Row, measure
from pipedream.simulate.measures import Steps, held_activations, idle
from pipedream.simulate.simulator import Timeline
from pipedream_simple import number, percent

from results.lab.tutorial.goals import GPU_GOAL, points_error
from results.lab.tutorial.tables import Record, title_of

CURVE: dict[str, Any] = {
    "color": LINE_COLORS[4], "marker": "D", "markersize": 6, "linewidth": 2,
    "drawstyle": "steps-post",
}  # fmt: skip
ARROW = {"arrowstyle": "-|>,head_width=0.16,head_length=0.32", "color": "black", "linewidth": 1.1,
         "shrinkA": 0, "shrinkB": 0}  # fmt: skip
MESSAGE = Line2D([], [], color="black", marker=">", label="message that a rank waits for")
RANKS = 4  # ranks of the drawn records on H200s
FIXED = ("gpipe", "1f1b", "eager-1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")


HELD_NOTE = "held: most microbatches whose activations each rank holds; W (or B) frees them"


class Picture(NamedTuple):
    """Arguments for lay_out."""

    title: str
    panels: list[Panel]
    notes: Sequence[str] = ()
    legend: Sequence[Artist] | None = None


def row_of(name: str, *, m: int = 8, communication: Fraction | int = 0, batches: int = 1) -> Row:
    """Simulate a schedule on 4 ranks with `F = I = W = 1`, and return the results as a row."""
    settings = {"num_microbatches": m, "communication": communication, "num_batches": batches}
    return measure(name, CONFIG | settings)


def _batch_panels(names: Sequence[str], communication: Fraction | int = 0) -> list[Panel]:
    panels = []
    for name in names:
        row = row_of(name, communication=communication)
        shares = idle_text(row.batch_idle)
        held = ", ".join(map(number, row.peak_activations))
        text = f"{row.title}: ends at {number(row.batch.makespan)}, idle {shares}; held: {held}"
        panels.append(Panel(text, row.batch))
    return panels


def one_f_one_b() -> Picture:
    panels = []
    for name in ("gpipe", "1f1b"):
        row = row_of(name)
        held = ", ".join(map(number, row.peak_activations))
        text = f"{row.title}: ends at {number(row.batch.makespan)}; most microbatches held"
        panels.append(Panel(f"{text}, by rank: {held}", row.batch))
    most = [number(max(row_of(name).peak_activations)) for name in ("gpipe", "1f1b")]
    title = (
        f"1F1B takes as long as GPipe, but a rank holds {most[1]} microbatches instead of {most[0]}"
    )
    return Picture(title, panels)


def asynchronous() -> Picture:
    panels = []
    for name in ("1f1b", "pipedream"):
        row = row_of(name, m=4, batches=2)
        share = percent(row.stream_idle.makespan_fraction)
        text = f"{row.title}: ends at {number(row.stream.makespan)}, idle {share}"
        panels.append(Panel(text, row.stream))
    ends = [number(panel.timeline.makespan) for panel in panels]
    title = (
        f"Two batches of 4 microbatches end at time {ends[0]} with a flush after each batch, "
        f"and at {ends[1]} without"
    )
    return Picture(title, panels)


def interleaving() -> Picture:
    panels = _batch_panels(("1f1b", "interleaved"))
    idles = [number(max(idle(panel.timeline).makespan)) for panel in panels]
    title = f"Two stages per rank: a rank idles for {idles[1]} time units instead of {idles[0]}"
    return Picture(title, panels, notes=(HELD_NOTE,))


def zero_bubble() -> Picture:
    panels = _batch_panels(("1f1b", "zb-h1", "zb-h2", "zb-v"))
    zero_idle = [
        panel.text.partition(":")[0] for panel in panels if not any(idle(panel.timeline).span)
    ]
    title = f"No idle time between a rank's first and last operation: {' and '.join(zero_idle)}"
    notes = (
        "From batch to batch, ranks do not idle either, unless the optimizer step waits for all "
        "ranks, for example to clip the global gradient norm",
        HELD_NOTE,
    )
    return Picture(title, panels, notes=notes)


def communication() -> Picture:
    c = Fraction(1)
    panels = _batch_panels(("gpipe", "1f1b", "zb-h2"), c)
    without_messages = [row_of(name).batch.makespan for name in ("gpipe", "1f1b", "zb-h2")]
    delays = [
        number(p.timeline.makespan - t) for p, t in zip(panels, without_messages, strict=True)
    ]
    title = (
        f"Messages take {number(c)}, as long as a forward pass. They delay GPipe by {delays[0]}, "
        f"1F1B by {delays[1]} and ZB-H2 by {delays[2]} time units"
    )
    legend = [*kind_legend([p.timeline for p in panels]), MESSAGE]
    return Picture(title, panels, notes=(HELD_NOTE,), legend=legend)


class Message(NamedTuple):
    """A result that is sent from one rank to another."""

    sender: int
    sent: Fraction
    receiver: int
    arrives: Fraction


def find_awaited_messages(timeline: Timeline) -> list[Message]:
    """Return the messages whose arrival ends a rank's idle time."""
    ranks, times = timeline.schedule.rank_by_op(), timeline.times
    ends: dict[int, Fraction] = {}  # by rank: end of its last operation
    free: dict[Any, Fraction] = {}  # operation -> time at which its rank was free for it
    for event in timeline.events:
        free |= dict.fromkeys(event.item.parts, ends.get(event.rank, Fraction(0)))
        ends[event.rank] = event.end
    rows = []
    for sender, receiver in transfers(timeline.schedule):
        sent, arrives = times[sender][1], times[sender][1] + timeline.costs.communication
        if arrives == times[receiver][0] > free[receiver]:
            rows.append(Message(ranks[sender], sent, ranks[receiver], arrives))
    return sorted(rows, key=lambda message: (message.receiver, message.arrives))


def draw_picture(picture: Picture, path: Path) -> Figure:
    """Save the picture, with a digest of the drawn data in the file's metadata. If the legend
    includes messages, draw an arrow for each message that a rank waits for."""
    title, panels, notes, legend = picture
    figure = lay_out(title, panels, notes=notes, legend=legend)
    for ax, panel in zip(figure.axes, panels, strict=True):
        for message in find_awaited_messages(panel.timeline) if MESSAGE in (legend or ()) else ():
            ends = (float(message.arrives), message.receiver), (float(message.sent), message.sender)
            ax.annotate("", *ends, arrowprops=ARROW)
    return save(figure, path, digest(picture))


def digest(picture: Picture) -> str:
    """Return a digest of every event's start and end, and of all labels."""
    parts = [picture.title, *picture.notes]
    for panel in picture.panels:
        parts += [panel.text, *events_text(panel.timeline)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def events_text(timeline: Timeline) -> list[str]:
    """Return all events as text, for a digest."""
    return [f"{e.rank} {e.item} {e.start} {e.end}" for e in timeline.events]


PICTURES = {
    "one_f_one_b": one_f_one_b,
    "asynchronous": asynchronous,
    "interleaving": interleaving,
    "zero_bubble": zero_bubble,
    "communication": communication,
}


HELD_SCHEDULES = ("1f1b", "zb-h1")


def draw_held(path: Path) -> Figure:
    """Draw the timelines of HELD_SCHEDULES, and below each how many microbatches' activations each
    rank holds over time."""
    rows = [row_of(name) for name in HELD_SCHEDULES]
    most = [number(max(row.peak_activations)) for row in rows]
    timelines = [row.batch for row in rows]
    figure, axes = new_figure(
        f"ZB-H1 delays W, and W frees the activations: every rank holds up to {most[1]} "
        f"microbatches, as many as rank 0 holds under 1F1B ({most[0]})",
        [scale * grid_height(timeline) for timeline in timelines for scale in (1.2, 1.0)],
        legend=kind_legend(timelines), gap=0.5,
    )  # fmt: skip
    until = max(timeline.makespan for timeline in timelines)
    for row, grid, strip in zip(rows, axes[::2], axes[1::2], strict=True):
        text = f"{row.title}: ends at {number(row.batch.makespan)}"
        draw_grid(grid, Panel(text, row.batch), until=until)
        _draw_strip(strip, row.batch)
        strip.set_xlim(grid.get_xlim())
    for ax in axes[:-1]:
        ax.tick_params(labelbottom=False)
    axes[-1].set_xlabel(f"time in units: {durations_text(timelines[0])}", fontsize=TEXT)
    return save(figure, path, held_digest())


def _draw_strip(ax: Axes, timeline: Timeline) -> None:
    """Draw each rank's number of held microbatches over time as bars with this number."""
    curves = held_activations(timeline.schedule, timeline.times)
    unit = ROW / float(max(held for steps in curves for _, held in steps))
    for rank, steps in enumerate(curves):
        changes: Steps = []
        for time, held in dict(steps).items():  # the last of several changes at the same time
            if not changes or held != changes[-1][1]:
                changes.append((time, held))
        changes.append((timeline.makespan, Fraction(0)))
        for (begin, held), (end, _) in pairwise(changes):
            x, height = float(begin), unit * float(held)
            box = (x, rank + ROW / 2 - height), float(end) - x, height
            ax.add_patch(Rectangle(*box, facecolor=LINE_COLORS[5], alpha=0.55))
            if held:
                style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 9}
                ax.text((x + float(end)) / 2, box[0][1] + height / 2, number(held), **style)
    ax.set_ylim(len(curves) - 0.5, -0.5)
    rank_axis(ax, len(curves))
    panel_title(ax, "Microbatches whose activations the rank holds")


def held_digest() -> str:
    """Return the digest of all drawn data."""
    return hash_data([events_text(row_of(name).batch) for name in HELD_SCHEDULES])


LOSSES = {
    "work at full speed": LINE_COLORS[6], "small kernels": LINE_COLORS[3], "bubble": GRAY,
}  # fmt: skip
CURVE_BATCH = 64  # sequences in a batch


def batch_times(record: Record) -> list[tuple[float, float, float]]:
    """Return the times in LOSSES for each micro-batch size, in ms: work at the best measured speed,
    the time that smaller kernels add to it, and the bubble (p-1) (F+B)."""
    work = CURVE_BATCH * min(row["seconds"] / row["sequences"] for row in record["rows"])
    times = []
    for row in record["rows"]:
        busy = CURVE_BATCH // row["sequences"] * row["seconds"]
        parts = work, busy - work, (RANKS - 1) * row["seconds"]
        times.append((1e3 * parts[0], 1e3 * parts[1], 1e3 * parts[2]))
    return times


def draw_microbatch_size(record: Record, path: Path) -> Figure:
    """Plot the measured speed of a block against the micro-batch size, and beside it the time of
    one batch on RANKS ranks, with its losses."""
    rows, settings = record["rows"], record["settings"]
    machine = record["device"].partition(",")[0].replace("NVIDIA ", "")
    figure, (speed_axes, time_axes) = new_figure(
        f"Small microbatches are slow, and large ones leave too few to fill {RANKS} ranks",
        [3.4], columns=2, left=1.0,
        legend=[Patch(color=color, label=text) for text, color in LOSSES.items()],
        notes=[
            f"Left: a block of {settings['model']}, {settings['tokens']} tokens each, forward and "
            f"backward, one thread of a {machine}. Right: GPipe or 1F1B",
            f"on {RANKS} ranks with a block each, calculated from the times on the left, c = 0",
        ],
    )  # fmt: skip
    sizes = [row["sequences"] for row in rows]
    speeds = [row["sequences"] / row["seconds"] for row in rows]
    places = range(len(sizes))
    panel_title(speed_axes, "Measured speed of a block")
    speed_axes.plot(places, speeds, color="black", marker="o")
    speed_axes.set_ylim(0, 1.15 * max(speeds))
    speed_axes.set_ylabel("sequences per second", fontsize=TEXT)
    speed_axes.set_xticks(places, sizes)
    speed_axes.set_xlabel("sequences per microbatch", fontsize=TEXT)
    totals = [0.0] * len(sizes)
    for color, parts in zip(LOSSES.values(), zip(*batch_times(record), strict=True), strict=True):
        time_axes.bar(places, parts, 0.7, totals, color=color)
        totals = [total + part for total, part in zip(totals, parts, strict=True)]
    for place, total in enumerate(totals):
        weight = "bold" if total == min(totals) else "normal"
        style: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": SMALL}
        time_axes.text(place, total, f"{total:.0f}", weight=weight, **style)
    best = sizes[totals.index(min(totals))]
    panel_title(
        time_axes, f"{CURVE_BATCH} sequences: fastest at size {best}, m = {CURVE_BATCH // best}"
    )
    time_axes.set_ylim(0, 1.15 * max(totals))
    time_axes.set_ylabel("ms per batch", fontsize=TEXT)
    time_axes.set_xticks(places, [f"{n}\n{CURVE_BATCH // n}" for n in sizes])
    time_axes.set_xlabel("sequences per microbatch (above), m (below)", fontsize=TEXT)
    for ax in (speed_axes, time_axes):
        ax.set_xlim(-0.6, len(sizes) - 0.4)
        ax.grid(axis="y", color="#E6E6E6")
    return save(figure, path, hash_data(record))


def fixed_points(communication: int) -> dict[tuple[Fraction, Fraction], list[str]]:
    """Return the titles of the fixed schedules, grouped by two numbers: the most microbatches that
    a rank holds, and the makespan."""
    names_at: dict[tuple[Fraction, Fraction], list[str]] = defaultdict(list)
    for name in FIXED:
        row = row_of(name, communication=communication)
        names_at[max(row.peak_activations), row.batch.makespan].append(row.title)
    return names_at


def draw_frontier(record: Record, path: Path) -> Figure:
    """Plot the time of a batch against the memory limit. Fixed schedules are points, and orders
    from the search form a curve. There is one panel per communication time."""
    proved = all(row["makespan"] == row["lower_bound"] for row in record["rows"])
    optimality = "proved to be the shortest" if proved else "the shortest found"
    figure, axes = new_figure(
        f"{record['num_stages']} ranks, {record['num_microbatches']} microbatches: with "
        "communication, more memory saves time; search finds orders between ZB-H1 and ZB-H2",
        [4.6],
        columns=2,
        legend=[
            Line2D([], [], label=f"search: {optimality}, with one stage per rank", **CURVE),
            Line2D([], [], label="fixed schedules", **DOMINATED_STYLE),
        ],
        notes=[
            "F = I = W = 1 on every rank. Two stages per rank can be faster, as ZB-V is at c = 0"
        ],
    )
    times = sorted({row["communication"] for row in record["rows"]})
    for ax, communication in zip(axes, times, strict=True):
        curve = [
            (row["memory"], float(Fraction(row["makespan"])))
            for row in record["rows"]
            if row["communication"] == communication and row["memory"] > 2
        ]
        titles_by_point = {
            (float(x), float(y)): ", ".join(names)
            for (x, y), names in fixed_points(communication).items()
        }
        ax.plot([x for x, _ in curve], [y for _, y in curve], **CURVE)
        ax.plot([x for x, _ in titles_by_point], [y for _, y in titles_by_point], **DOMINATED_STYLE)
        ax.set_ylim(
            0.9 * min(y for _, y in (*curve, *titles_by_point)),
            1.1648 * max(y for _, y in titles_by_point),
        )
        ax.set_xlim(2.5, max(x for x, _ in curve) + 1.2)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_xlabel("peak activations on the fullest rank, in microbatches", fontsize=TEXT)
        ax.grid(color="#E6E6E6")
        line = [
            (float(x), float(y))
            for (left, high), (right, low) in pairwise(curve)
            for x, y in [
                *((x, high) for x in np.linspace(left, right, 20)),
                *((right, y) for y in np.linspace(low, high, 20)),
            ]
        ]
        place_labels(ax, titles_by_point, avoid=line)
        panel_title(ax, f"Communication c = {number(Fraction(communication))}")
    axes[0].set_ylabel("time of one batch", fontsize=TEXT)
    return save(figure, path, frontier_digest(record))


def frontier_digest(record: Record) -> str:
    """Return the digest of all drawn data."""
    return hash_data([record["rows"], [[str(fixed_points(c))] for c in (0, 1)]])


def hash_data(drawn: object) -> str:
    """Return the digest of data that can be written as JSON."""
    return hashlib.sha256(json.dumps(drawn).encode()).hexdigest()


def draw_prediction(records: Sequence[tuple[str, Record]], path: Path) -> Figure:
    """Plot the simulation's error against the measured utilization for every predicted run.
    `records` contains pairs of a label and a record. Filled markers show the runs that provided the
    simulation's durations. Cases without a prediction are omitted."""
    cases = [(text, record, case) for text, record in records for case in predicted_cases(record)]
    machines = list(dict.fromkeys(_machine(record) for _, record in records))
    colors = {machine: LINE_COLORS[1 + i % 7] for i, machine in enumerate(machines)}
    predicted = [labeled for labeled in cases if not labeled[2]["calibrated_on"]]
    text, _, worst = max(predicted, key=lambda labeled: abs(points_error(labeled[2])))
    worst_run = f"{title_of(worst['schedule'])}, m = {worst['num_microbatches']}, {text}"
    num_within = sum(abs(points_error(case)) <= GPU_GOAL.limit for _, _, case in predicted)
    markers = {KIND_OF.get(case["schedule"], SEARCHED): "" for _, _, case in cases}
    markers = {kind: MARKERS[index] for index, kind in enumerate(sorted(markers))}
    dot: dict[str, Any] = HOLLOW_MARKER | {"markersize": 9, "linestyle": "", "color": "black"}
    legend: list[Artist] = [Patch(color=colors[machine], label=machine) for machine in colors]
    for kind, marker in markers.items():
        legend.append(Line2D([], [], label=kind, **dot | {"marker": marker}))
    filled = dot | {"marker": "o", "markerfacecolor": "black"}
    legend.append(Line2D([], [], label="run that provided the times (filled)", **filled))
    figure, (ax,) = new_figure(
        f"{num_within} of {len(predicted)} predicted runs are within {GPU_GOAL.limit:g} points of "
        f"the measured utilization; the largest error is {abs(points_error(worst)):.1f}",
        [4.4], legend=legend, legend_columns=4, left=1.05,
        notes=[f"Largest error: {worst_run}"],
    )  # fmt: skip
    ax.axhspan(-GPU_GOAL.limit, GPU_GOAL.limit, color="#EFEFEF", linewidth=0, zorder=0)
    ax.axhline(0, color="black", linewidth=0.8, zorder=1)
    for _, record, case in cases:
        kind = KIND_OF.get(case["schedule"], SEARCHED)
        style = dot | {"color": colors[_machine(record)], "marker": markers[kind]}
        if case["calibrated_on"]:
            style["markerfacecolor"] = style["color"]
        ax.plot([case["measured"]["utilisation"]], [points_error(case)], **style)
    limit = 1.2 * max(GPU_GOAL.limit, *(abs(points_error(case)) for _, _, case in cases))
    ax.set_ylim(-limit, limit)
    ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:+g}" if y else "0"))
    ax.set_xlabel("measured utilization", fontsize=TEXT)
    ax.set_ylabel("simulated minus measured, points", fontsize=TEXT)
    ax.annotate(
        f"goal on GPUs: within {GPU_GOAL.limit:g} points", (0, -GPU_GOAL.limit),
        xycoords=ax.get_yaxis_transform(), xytext=(8, 6), textcoords="offset points",
        fontsize=SMALL, color=GRAY,
    )  # fmt: skip
    return save(figure, path, prediction_digest(records))


SEARCHED = "order found by search"
KIND_OF = {
    "gpipe": "whole backward passes", "1f1b": "whole backward passes",
    "interleaved": "whole backward passes", "pipedream": "no flush",
    "zb-h1": "split backward passes", "zb-h2": "split backward passes",
    "zb-v": "split, stages in a V",
    "v-half": "split, stages in a V",
    "v-min": "split, stages in a V",
}  # fmt: skip
"""Kind of a record's schedule, for prediction.png."""


def _machine(record: Record) -> str:
    return f"{record['num_stages']} stages, {record['machine']['device'].partition(',')[0]}"


def predicted_cases(record: Record) -> list[Record]:
    """Return the record's cases that have a prediction."""
    return [case for case in record["cases"] if case["predicted"] is not None]


def prediction_digest(records: Sequence[tuple[str, Record]]) -> str:
    """Return the digest of all drawn data."""
    keys = ("schedule", "num_microbatches", "calibrated_on")
    drawn = [
        [text, *([*(case[key] for key in keys), case["measured"]["utilisation"],
                  case["predicted"]["utilisation"]] for case in predicted_cases(record))]
        for text, record in records
    ]  # fmt: skip
    return hash_data(drawn)


HELD_MICROBATCHES = {
    "zb-h2": 2 * RANKS - 1, "1f1b": None, "zb-h1": RANKS, "zb-v": RANKS,
    "v-half": RANKS // 2 + 1, "v-min": (RANKS + 4) // 3,
}  # fmt: skip
"""Schedule -> the most microbatches that each rank holds. None stands for p - r."""


def draw_gib(record: Record, path: Path) -> Figure:
    """Plot the number of microbatches that each rank holds and each rank's measured peak memory, in
    two panels with one line per schedule."""
    peaks = {case["schedule"]: case["measured"]["peak_memory_mib"] for case in record["cases"]}
    gib = {name: [mib / 1024 for mib in peaks[name]] for name in HELD_MICROBATCHES}
    first, last = gib["1f1b"][0], gib["1f1b"][-1]
    figure, axes = new_figure(
        f"Under 1F1B, rank r holds p - r microbatches: {first:.1f} GiB on rank 0, {last:.1f} GiB "
        "on the last rank",
        [4.2], columns=2, left=0.95, right=0.3,
        notes=[
            record["workload"].replace(" a stage", " per stage").replace(" a micro", " per micro"),
            f"{_machine(record)}, m = 8; V-Half and V-Min without reordering",
        ],
    )  # fmt: skip
    ranks = range(RANKS)
    for row, (name, held) in enumerate(HELD_MICROBATCHES.items()):
        counts = [RANKS - r if held is None else held for r in ranks]
        style = HOLLOW_MARKER | {"marker": MARKERS[row], "markersize": 8, "linewidth": 2}
        for ax, values in zip(axes, (counts, gib[name]), strict=True):
            ax.plot(ranks, values, color=LINE_COLORS[row], **style)
        title = title_of(name).partition(",")[0].partition(" ")[0]
        label_shift = {"zb-h1": 1.1, "zb-v": -1.1}.get(name, 0)
        axes[1].annotate(
            f"{title} {gib[name][0]:.1f} to {gib[name][-1]:.1f}",
            (RANKS - 0.86, gib[name][-1] + label_shift),
            fontsize=SMALL, color=darker(LINE_COLORS[row]), va="center",
        )  # fmt: skip
    axes[0].annotate("1F1B: p - r", (2.1, 2.12), fontsize=SMALL, color=darker(LINE_COLORS[1]))
    axes[1].set_xlim(-0.15, RANKS + 0.75)
    for ax in axes:
        ax.set_xticks(ranks)
        ax.set_xlabel("rank r", fontsize=TEXT)
        ax.set_ylim(0)
        ax.grid(color="#E6E6E6")
    panel_title(axes[0], "Simulated: most microbatches held")
    panel_title(axes[1], "Measured: peak memory, GiB")
    return save(figure, path, gib_digest(record))


def gib_digest(record: Record) -> str:
    """Return the digest of all drawn data."""
    return hash_data(
        [[case["schedule"], case["measured"]["peak_memory_mib"]] for case in record["cases"]]
    )


def draw_gradient_error(rows: Sequence[Record], path: Path) -> Figure:
    """Plot the gradient error without weight stashing against learning rate, depth and stage. Each
    row contains num_stages, learning_rate, mode (a schedule's name), median_relative_error and
    per_stage (the error on each stage). An error is None if training diverged. Errors of exactly 0
    are drawn on a separate line below the logarithmic axis."""
    without_stashing = [row for row in rows if row["mode"] == "pipedream-no-stash"]
    with_stashing = [row for row in rows if row["mode"] == "pipedream"]
    numbers = [row for row in without_stashing if row["median_relative_error"] is not None]
    depths = sorted({row["num_stages"] for row in rows})
    figure, axes = new_figure(
        _error_title(numbers, with_stashing), [4.6], columns=2, left=1.4, right=0.3
    )
    for i, p in enumerate(depths):
        for group, dashes in ((without_stashing, "-"), (with_stashing, ":")):
            curve = sorted(
                (row["learning_rate"], row["median_relative_error"])
                for row in group
                if row["num_stages"] == p and row["median_relative_error"] is not None
            )
            _error_line(axes[0], curve, dashes, i, f"p = {p}" if dashes == "-" else "")
    axes[0].set_xscale("log")
    axes[0].xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes[0].set_xlabel("learning rate of a batch", fontsize=TEXT)
    panel_title(axes[0], "All stages: without stashing, and with stashing (dotted)")
    rates = sorted({row["learning_rate"] for row in numbers})
    rate = rates[len(rates) // 2]
    for row in numbers:
        if row["learning_rate"] == rate:
            points = list(enumerate(row["per_stage"]))
            name = f"p = {row['num_stages']}"
            _error_line(axes[1], points, "-", depths.index(row["num_stages"]), name, label_index=0)
    axes[1].xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[1].set_xlabel("stage (on the last, B directly follows F)", fontsize=TEXT)
    panel_title(axes[1], f"By stage, without stashing, learning rate {rate:g}")
    axes[1].set_xlim(-0.3, 0.3 + max(depths) - 1)
    values = np.concatenate([line.get_ydata() for ax in axes for line in ax.get_lines()])
    errors = values[values > 0]
    smallest = 10.0 ** math.floor(math.log10(errors.min()))
    powers = [smallest * 10.0**k for k in range(20)]
    ticks = [0.0, *(power for power in powers if power <= errors.max())]
    for ax in axes:
        log_axis(ax, smallest, 0.6, ticks, "exactly 0")
        ax.set_ylim(-0.3 * smallest, 1.5 * errors.max())
    axes[0].set_ylabel("relative error of the gradient, median", fontsize=TEXT)
    return save(figure, path, gradient_digest(rows))


def _error_title(numbers: Sequence[Record], with_stashing: Sequence[Record]) -> str:
    """Return a title with the smallest and largest errors without stashing, and the largest error
    with stashing."""
    ordered = sorted(numbers, key=lambda row: row["median_relative_error"])
    low, high = (
        f"{100 * row['median_relative_error']:.2g}% (p = {row['num_stages']}, learning rate "
        f"{row['learning_rate']:g})"
        for row in (ordered[0], ordered[-1])
    )
    largest = max((row["median_relative_error"] or 0 for row in with_stashing), default=0)
    stashing_text = "exactly 0" if largest == 0 else f"{100 * largest:.2g}% at most"
    return (
        f"Without stashing, gradients are off by {low} to {high}; with stashing, by {stashing_text}"
    )


def darker(color: str) -> tuple[float, ...]:
    """Return a darker shade of `color`, in which text is readable."""
    red, green, blue = to_rgb(color)
    return (0.65 * red, 0.65 * green, 0.65 * blue)


def _error_line(
    ax: Axes,
    points: Sequence[tuple[float, float]],
    dashes: str,
    index: int,
    name: str,
    label_index: int = -1,
) -> None:
    """Draw one line, with a name beside the first or last point. Markers stay visible where lines
    meet."""
    if not points:
        return
    color = LINE_COLORS[1 + index % 7]
    style = HOLLOW_MARKER | {"marker": MARKERS[index], "markersize": max(5.0, 12.0 - 2 * index)}
    xs, ys = [x for x, _ in points], [y for _, y in points]
    ax.plot(xs, ys, linestyle=dashes, linewidth=2, color=color, **style)
    if name:
        ax.annotate(
            name, points[label_index], xytext=(9, 2), textcoords="offset points", fontsize=SMALL,
            color=darker(color), fontweight="bold",
        )  # fmt: skip


def gradient_digest(rows: Sequence[Record]) -> str:
    """Return the digest of all drawn data."""
    keys = ("num_stages", "learning_rate", "mode", "median_relative_error", "per_stage")
    return hash_data([[row[key] for key in keys] for row in rows])
