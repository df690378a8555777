"""Pictures of timelines: ranks from top to bottom, time from left to right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from pipedream.draw.page import (
    DPI,
    EDGE,
    LEAST,
    SMALL,
    TEXT,
    WIDTH,
    Colour,
    ink,
    new_figure,
    number,
    paler,
    panel_title,
    percent,
    save,
)
from pipedream.schedules.ops import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Op,
    Pair,
    Schedule,
)
from pipedream.schedules.policies import WeightUse
from pipedream.simulate.comparison import Refused, Row
from pipedream.simulate.measures import Idle, idle, peak_activations
from pipedream.simulate.simulator import Event, Timeline, simulate

KINDS = {
    FORWARD: ("#56B4E9", "F  forward"),
    BACKWARD: ("#D55E00", "B  whole backward"),
    INPUT_GRADIENT: ("#F0E442", "I  input gradient"),
    WEIGHT_GRADIENT: ("#00523B", "W  weight gradient"),
}
"""Colour and name of each kind of operation."""
IDLE_HATCH: dict[str, Any] = {
    "facecolor": "#FFFFFF", "edgecolor": "#C9C9C9", "hatch": "////", "linewidth": 0.0,
}  # fmt: skip
ROW = 0.88
"""Height of a rank's cells, where ranks are 1 apart."""

Colouring = Callable[[Op], Colour]
Labeller = Callable[[Op], str]
Box = tuple[float, float, float, float]
"""x, y, width, height in data units."""


def kind_colours(schedule: Schedule) -> Colouring:
    """The colour of an operation's kind, paler for a rank's second, third ... stage.

    Of two copies of the model, the second one's stages are the paler ones on all ranks.
    """
    position = schedule.position()
    copy = {stage: number for number, chain in enumerate(schedule.chains) for stage in chain}
    pale = {
        stage: place / max(2, len(stages))
        for stages in schedule.stages()
        for place, stage in enumerate(sorted(stages, key=lambda s: (copy[s], position[s])))
    }
    return lambda op: paler(KINDS[op.kind][0], pale[op.stage])


def microbatch_number(op: Op) -> str:
    """What cells show by default."""
    return str(op.microbatch)


def kind_legend(timelines: Sequence[Timeline]) -> list[Artist]:
    """Swatches for the kinds that occur, and for idle time."""
    used = {op.kind for timeline in timelines for op in timeline.schedule.ops()}
    entries: list[tuple[Colour, str]] = [own for kind, own in KINDS.items() if kind in used]
    if any(len(own) > 1 for t in timelines for own in t.schedule.stages()):
        copies = max(len(t.schedule.chains) for t in timelines)
        text = "paler: 2nd stage or copy" if copies > 1 else "paler: a rank's second stage"
        entries.append((paler(KINDS[FORWARD][0], 1 / 2), text))
    edge: dict[str, Any] = {"edgecolor": EDGE, "linewidth": 0.6}
    swatches = [Patch(facecolor=colour, label=text, **edge) for colour, text in entries]
    return [*swatches, Patch(**IDLE_HATCH, label="idle")]


def row_height(num_ranks: int) -> float:
    """Inches for one rank's row: lower where there are many."""
    return max(0.16, min(0.34, 2.2 / num_ranks))


def draw_grid(
    ax: Axes,
    timeline: Timeline,
    *,
    until: Fraction | None = None,
    colour: Colouring | None = None,
    labels: Sequence[Labeller] = (microbatch_number,),
) -> None:
    """One rectangle for each operation: x and width are its time, y its rank (0 on top).

    The halves of a pair share the rank's row. The time axis ends at `until` (the makespan). Cells
    get the first of `labels` that fits in all of them, or the last in those where it fits. Each
    rectangle's gid is the operation as text; behind them lies one a rank, "idle 0", from time 0 to
    the makespan.
    """
    colour = colour or kind_colours(timeline.schedule)
    end = timeline.makespan if until is None else until
    num_ranks = timeline.schedule.num_ranks
    ax.set_xlim(0, 1.002 * float(end))
    ax.set_ylim(num_ranks - 0.5, -0.5)
    for rank in range(num_ranks):
        place = (0.0, rank - ROW / 2), float(timeline.makespan), ROW
        ax.add_patch(Rectangle(*place, **IDLE_HATCH, gid=f"idle {rank}"))
    cells = [cell for event in timeline.all_events() for cell in _cells(event)]
    narrowest = min(box[2] for _, box in cells if box[2] > 0) * points_per_unit(ax)[0]
    edge: dict[str, Any] = {"edgecolor": EDGE, "linewidth": min(0.6, 0.08 * narrowest)}
    for op, (x, y, width, height) in cells:
        cell = Rectangle((x, y), width, height, facecolor=colour(op), **edge, gid=str(op))
        ax.add_patch(cell)
    inside = [(op, box) for op, box in cells if box[0] + box[2] <= float(end) and box[2] > 0]
    _write_labels(ax, inside, colour, labels)
    rank_axis(ax, num_ranks)


def points_per_unit(ax: Axes) -> tuple[float, float]:
    """Printer's points that one unit of an axes' x and of its y takes."""
    (left, right), (low, high) = ax.get_xlim(), ax.get_ylim()
    across = ax.bbox.width / abs(right - left)
    down = ax.bbox.height / abs(high - low)
    return across * 72 / DPI, down * 72 / DPI


def rank_axis(ax: Axes, num_ranks: int, *, most_times: int = 12) -> None:
    """A tick for every rank, and at most so many for whole times."""
    ax.set_yticks(range(num_ranks), [str(rank) for rank in range(num_ranks)])
    ax.set_ylabel("rank", fontsize=TEXT)
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=most_times, integer=True))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda time, _: number(time)))


def _cells(event: Event) -> list[tuple[Op, Box]]:
    """(operation, box): a pair's forward lies above its backward."""
    parts = event.item.parts
    top = event.rank - ROW / 2
    x = float(event.start)
    width = float(event.end - event.start)
    height = ROW / len(event.item.parts)
    return [(op, (x, top + place * height, width, height)) for place, op in enumerate(parts)]


def _write_labels(
    ax: Axes, cells: Sequence[tuple[Op, Box]], colour: Colouring, labels: Sequence[Labeller]
) -> None:
    across, down = points_per_unit(ax)

    def room(op: Op, box: Box, label: Labeller) -> float:
        """The largest font, in points, with which the label stays inside the cell."""
        lines = label(op).split("\n")
        # A digit of DejaVu Sans is 0.64 of the font's size wide, a line 1.2 of it high.
        by_width = (box[2] * across - 2) / (0.66 * max(map(len, lines)))
        return min(by_width, (box[3] * down - 1) / (1.2 * len(lines)))

    for label in labels:
        rooms = [room(op, box, label) for op, box in cells]
        if min(rooms, default=0) >= LEAST:
            break
    size = min(SMALL, max(LEAST, min(rooms, default=0)))
    # Where some cells are too small, their kind goes without: half a row of numbers misleads.
    tight = {
        (op.kind, box[3]) for (op, box), space in zip(cells, rooms, strict=True) if space < size
    }
    style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": size, "linespacing": 1.05}
    for op, (x, y, width, height) in cells:
        if (op.kind, height) not in tight:
            ax.text(x + width / 2, y + height / 2, label(op), color=ink(colour(op)), **style)


class Panel(NamedTuple):
    """A timeline, the line above it, and how it is drawn if not by kind."""

    text: str
    timeline: Timeline
    labels: Sequence[Labeller] = (microbatch_number,)
    colour: Colouring | None = None


class Picture(NamedTuple):
    """Timelines above each other, on one time axis."""

    title: str
    panels: list[Panel]
    unit: str | None = None
    """The time axis's label; None: the durations, which are the same for all panels."""
    notes: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    """The ranks' names; empty: their numbers."""
    tall: float = 1.2
    """Height of a row, in row heights."""
    until: Fraction | None = None
    """The end of the time axis; None: the last makespan."""
    legend: Sequence[Artist] | None = None
    right: float = 0.4
    """Inches beside the panels."""


def draw_picture(picture: Picture, path: Path) -> Figure:
    """Write it."""
    figure, _ = lay_out(picture)
    return save(figure, path)


def lay_out(picture: Picture) -> tuple[Figure, list[Axes]]:
    """The page with all panels drawn."""
    timelines = [panel.timeline for panel in picture.panels]
    until = picture.until or max(timeline.makespan for timeline in timelines)
    heights = []
    for timeline in timelines:
        p = timeline.schedule.num_ranks
        pairs = any(isinstance(item, Pair) for order in timeline.schedule.orders for item in order)
        # A quarter more where operations in pairs share a row.
        heights.append(picture.tall * (p * row_height(p) * (1.25 if pairs else 1)))
    legend = kind_legend(timelines) if picture.legend is None else list(picture.legend)
    figure, axes = new_figure(
        picture.title,
        heights,
        legend=legend,
        head=0.45 if picture.panels[0].text else 0.2,
        gap=0.5,
        notes=picture.notes,
        left=2.5 if picture.rows else 0.95,
        right=picture.right,
    )
    for ax, panel in zip(axes, picture.panels, strict=True):
        draw_grid(ax, panel.timeline, until=until, colour=panel.colour, labels=panel.labels)
        panel_title(ax, panel.text)
        if picture.rows:
            ax.set_yticks(range(len(picture.rows)), picture.rows)
        ax.tick_params(labelbottom=ax is axes[-1])
    time_label(axes[-1], timelines[-1], picture.unit)
    return figure, axes


def idle_text(shares: Idle) -> str:
    """Both idle shares: of the makespan, and of the ranks' own spans."""
    makespan = percent(shares.makespan_fraction)
    span = percent(shares.span_fraction)
    return f"{makespan} of the makespan, {span} of the spans"


def cost_text(timeline: Timeline) -> str:
    """When a timeline ends, what share of it is idle, and what each rank holds."""
    held = ", ".join(map(number, peak_activations(timeline.schedule)))
    share = percent(idle(timeline).makespan_fraction)
    ends = number(timeline.makespan)
    return f"ends at {ends}, idle {share}; microbatches held at most by rank {held}"


def time_label(ax: Axes, timeline: Timeline, text: str | None = None) -> None:
    """Names the time axis and its unit: the durations, if not something else."""
    ax.set_xlabel(text or f"time in units: {durations_text(timeline)}", fontsize=TEXT)


def durations_text(timeline: Timeline) -> str:
    """What one microbatch takes on a rank's whole share: 'F = 1, B = I + W = 1 + 1 = 2'."""
    costs = timeline.costs
    v = timeline.schedule.stages_per_rank
    first = costs.forward[0], costs.input_gradient[0], costs.weight_gradient[0]
    f, i, w, b = (number(v * each) for each in (*first, first[1] + first[2]))
    forwards_only = all(op.kind == FORWARD for op in timeline.schedule.ops())
    where = "" if len(set(costs.forward)) == 1 else " on the first stage"
    return f"F = {f}" + ("" if forwards_only else f", B = I + W = {i} + {w} = {b}") + where


def refusals(refused: Sequence[Refused]) -> list[str]:
    """Notes on which schedules this size does not allow, and why."""
    return [f"Not possible here: {one.reason.partition(';')[0]}" for one in refused]


def wrong_backwards(use: dict[int, WeightUse]) -> set[tuple[int, int]]:
    """(stage, microbatch) whose backward pass sees other weights than its forward pass did."""
    return {
        (stage, i)
        for stage, one in use.items()
        for i, version in one.backward.items()
        if version != one.forward[i]
    }


def forwards_only(timeline: Timeline) -> Timeline:
    """The same orders without backward passes."""
    orders = tuple(
        tuple(op for item in order for op in item.parts if op.kind == FORWARD)
        for order in timeline.schedule.orders
    )
    return simulate(replace(timeline.schedule, orders=orders), timeline.costs)


def naive(timeline: Timeline) -> Picture:
    """One microbatch at a time: most of the picture is idle."""
    share = percent(idle(timeline).makespan_fraction)
    title = (
        f"One microbatch at a time: {timeline.schedule.num_ranks} ranks idle {share} of "
        f"{number(timeline.makespan)} time units"
    )
    return Picture(title, [Panel("", timeline)], tall=1.6)


def microbatch_backward(timeline: Timeline) -> Picture:
    """A whole GPipe batch: all forwards, then all backwards."""
    share = percent(idle(timeline).makespan_fraction)
    m = timeline.schedule.num_microbatches
    last = max(e.end for e in timeline.all_events() for op in e.item.parts if op.kind == FORWARD)
    title = (
        f"GPipe, {m} microbatches: forwards until time {number(last)}, backwards until "
        f"{number(timeline.makespan)}; ranks idle {share}"
    )
    return Picture(title, [Panel("", timeline)], tall=1.6)


def microbatch_forward(whole: Timeline, cut: Timeline) -> Picture:
    """How microbatches fill the pipeline: the forward half of one batch, uncut and cut."""
    p = cut.schedule.num_ranks
    m = cut.schedule.num_microbatches
    title = (
        f"Cut into {m} microbatches, the forward pass through {p} ranks ends at time "
        f"{number(cut.makespan)} instead of {number(whole.makespan)}"
    )
    idles = [f"ranks idle {percent(idle(t).makespan_fraction)}" for t in (whole, cut)]
    all_of_it = f"0-{m - 1}" if m > 1 else "0"
    panels = [
        Panel(f"The batch in one piece: {idles[0]}", whole, (lambda op: all_of_it,)),
        Panel(f"The same batch as {m} microbatches: {idles[1]}", cut),
    ]
    return Picture(title, panels, tall=1.4)


def all_schedules(everyone: Sequence[Row], refused: Sequence[Refused]) -> Picture:
    """One batch under every order, on one time axis; rows with equal orders share a panel:
    PipeDream's policies have 1F1B's."""
    groups: dict[object, list[Row]] = {}
    for row in everyone:
        groups.setdefault(row.batch.schedule.orders, []).append(row)
    rows = [group[0] for group in groups.values()]
    schedule = rows[0].batch.schedule
    # Naive takes so much longer than the others that on its scale they would all look alike.
    *_, second, longest = [Fraction(0), *sorted(row.batch.makespan for row in rows)]
    until = second if 0 < 2 * second < longest else longest
    ordered = sorted(rows, key=lambda row: row.batch_idle.makespan_fraction)
    worst, best = (
        f"{percent(row.batch_idle.makespan_fraction)}{text} ({row.title})"
        for row, text in ((ordered[-1], " idle"), (ordered[0], ""))
    )
    title = (
        f"One batch of {schedule.num_microbatches} microbatches on {schedule.num_ranks} ranks: "
        f"from {worst} to {best}"
    )
    panels = []
    for group in groups.values():
        timeline = group[0].batch
        shares = idle_text(group[0].batch_idle)
        text = f"{_names(group)}: ends at {number(timeline.makespan)}, idle {shares}"
        cut = f"; cut off at {number(until)}" if timeline.makespan > until else ""
        panels.append(Panel(text + cut, timeline))
    return Picture(title, panels, notes=tuple(refusals(refused)), tall=1, until=until)


def _names(group: Sequence[Row]) -> str:
    """An order's name, and who else runs it."""
    if len(group) == 1:
        return group[0].title
    variants = f" with its {len(group) - 2} variants" if len(group) > 2 else ""
    return f"{group[0].title} (and {group[1].title}{variants})"


def draw_weight_versioning(
    timeline: Timeline, uses: Sequence[tuple[str, dict[int, WeightUse]]], path: Path
) -> Figure:
    """Cells coloured by the weight version that each pass uses, one panel per way of training.

    `uses` has (panel's text, stage -> versions). A backward pass whose version is not its forward
    pass's is outlined.
    """
    backwards = sum(op.kind != FORWARD for op in timeline.schedule.ops())
    counts = " and ".join(f"{len(wrong_backwards(use))} {text}" for text, use in uses)
    newest = max(v for _, use in uses for one in use.values()
                 for v in (*one.forward.values(), *one.backward.values()))  # fmt: skip
    # The darkest shade is left out: black outlines would not show on it.
    shades = [colormaps["viridis"]((v + 1) / (newest + 1)) for v in range(newest + 1)]
    other = "B on other weights than its F"
    picture = Picture(
        f"Of {backwards} backward passes, {counts} see other weights than their forward pass did",
        [_versions_panel(timeline, text, use, shades) for text, use in uses],
        tall=1.9,
        right=1.25,
        legend=[
            Patch(facecolor="white", edgecolor="black", linewidth=3, label=other),
            Patch(**IDLE_HATCH, label="idle"),
        ],
    )
    figure, axes = lay_out(picture)
    for ax, (_, use) in zip(axes, uses, strict=True):
        wrong = {f"{stage}B{i}" for stage, i in wrong_backwards(use)}
        for patch in ax.patches:
            if isinstance(patch, Rectangle) and patch.get_gid() in wrong:
                width = min(3.0, 0.15 * patch.get_width() * points_per_unit(ax)[0])
                patch.set(edgecolor="black", linewidth=width, zorder=1.5, joinstyle="miter")
    _version_bar(figure, axes, ListedColormap(shades))
    return save(figure, path)


def _versions_panel(
    timeline: Timeline, text: str, use: dict[int, WeightUse], shades: Sequence[Colour]
) -> Panel:
    def version(op: Op) -> int:
        return use[op.stage].version(op)

    def told(op: Op) -> str:
        own = version(op)
        first = use[op.stage].forward[op.microbatch]
        return f"v{own}" if own == first else f"v{own}\u2260{first}"

    peaks = ", ".join(str(use[stage].peak_versions) for stage in sorted(use))
    labels = (
        lambda op: f"{op.kind}{op.microbatch}\n{told(op)}",
        lambda op: f"{op.kind}{op.microbatch}\nv{version(op)}",
        lambda op: f"{op.kind}{op.microbatch}",
    )
    title = f"{text[:1].upper()}{text[1:]}: versions kept by rank {peaks}"
    return Panel(title, timeline, labels, lambda op: shades[version(op)])


def _version_bar(figure: Figure, axes: Sequence[Axes], palette: ListedColormap) -> None:
    boxes = [ax.get_position() for ax in axes]
    bottom = boxes[-1].y0
    top = boxes[0].y1
    bar_axes = figure.add_axes((boxes[0].x1 + 0.25 / WIDTH, bottom, 0.22 / WIDTH, top - bottom))
    norm = BoundaryNorm([v - 0.5 for v in range(palette.N + 1)], palette.N)
    bar = figure.colorbar(ScalarMappable(norm=norm, cmap=palette), cax=bar_axes)
    bar.locator = MaxNLocator(nbins=12, integer=True)
    bar.minorticks_off()
    bar.update_ticks()
    bar.ax.tick_params(labelsize=SMALL)
    bar.set_label("weight version", fontsize=TEXT)
    bar.outline.set_edgecolor(EDGE)
