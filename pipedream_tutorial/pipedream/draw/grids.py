"""Draw timelines, with ranks from top to bottom and time from left to right."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator
from pipedream_simple import number, percent

from pipedream.draw import page
from pipedream.draw.page import EDGE, TEXT, Color
from pipedream.schedules.ops import Op, Pair, Schedule
from pipedream.schedules.policies import POLICIES, weight_use
from pipedream.simulate.comparison import Config, measure
from pipedream.simulate.measures import Idle, idle, peak_activations
from pipedream.simulate.simulator import Timeline, simulate

KINDS = {  # color and name
    "F": ("#56B4E9", "F  forward"),
    "B": ("#D55E00", "B  whole backward"),
    "I": ("#F0E442", "I  input gradient"),
    "W": ("#00523B", "W  weight gradient"),
}
IDLE_HATCH: dict[str, Any] = {
    "facecolor": "#FFFFFF", "edgecolor": "#C9C9C9", "hatch": "////", "linewidth": 0.0,
}  # fmt: skip
ROW = 0.88  # height of a rank's cells; ranks are 1 apart

Coloring = Callable[[Op], Color]


def kind_colors(schedule: Schedule) -> Coloring:
    """Return a function that maps an operation to the color of its kind. The color is paler for a
    rank's later stages."""
    pale = {
        stage: position / max(2, len(stages))
        for stages in schedule.stages_by_rank()
        for position, stage in enumerate(stages)
    }
    return lambda op: page.lighten(KINDS[op.kind][0], pale[op.stage])


def kind_legend(timelines: Sequence[Timeline]) -> list[Artist]:
    """Return legend entries for the kinds of operations in the timelines and for idle time."""
    used = {op.kind for timeline in timelines for op in timeline.schedule.ops()}
    entries: list[tuple[Color, str]] = [entry for kind, entry in KINDS.items() if kind in used]
    if any(len(entry) > 1 for t in timelines for entry in t.schedule.stages_by_rank()):
        entries.append((page.lighten(KINDS["F"][0], 1 / 2), "paler: 2nd stage"))
    swatches = [Patch(fc=color, ec=EDGE, lw=0.6, label=text) for color, text in entries]
    return [*swatches, Patch(**IDLE_HATCH, label="idle")]


def grid_height(timeline: Timeline) -> float:
    """Return a grid's height in inches. Rows are shorter if there are many ranks, and taller if
    they contain pairs."""
    p = timeline.schedule.num_ranks
    pairs = any(isinstance(item, Pair) for order in timeline.schedule.orders for item in order)
    return p * max(0.16, min(0.34, 2.2 / p)) * (1.25 if pairs else 1)


class Panel(NamedTuple):
    """Timeline with its title. By default, a cell shows its operation's kind as a color and its
    microbatch as a number."""

    text: str
    timeline: Timeline
    labels: Sequence[Callable[[Op], str]] = (lambda op: str(op.microbatch),)
    """Cells get the first label that fits in every cell. If no label fits everywhere, the last
    label is written in the cells where it fits."""
    color: Coloring | None = None
    outlined: Collection[Op] = ()


def draw_grid(ax: Axes, panel: Panel, *, until: Fraction | None = None) -> None:
    """Draw one rectangle per operation. The rectangle's x and width show when the operation runs,
    and its y shows the rank, with rank 0 on top. The two operations of a pair share the rank's row.
    The time axis ends at `until`, which defaults to the makespan. A rectangle's gid is the
    operation's name. Behind the operations, each rank has a rectangle from time 0 to the makespan,
    with the gid "idle"."""
    timeline = panel.timeline
    color = panel.color or kind_colors(timeline.schedule)
    end = float(timeline.makespan if until is None else until)
    num_ranks = timeline.schedule.num_ranks
    ax.set_xlim(0, 1.002 * end)
    ax.set_ylim(num_ranks - 0.5, -0.5)
    # Size in points of one unit of time and of one rank
    points_per_time_unit = ax.bbox.width / (1.002 * end) / page.PIXELS_PER_POINT
    points_per_rank = ax.bbox.height / num_ranks / page.PIXELS_PER_POINT
    ax.barh(range(num_ranks), float(timeline.makespan), ROW, **IDLE_HATCH, gid="idle")
    cells: dict[Op, Rectangle] = {}
    for rank, item, start, stop in timeline.events:
        height = ROW / len(item.parts)
        for half_index, op in enumerate(item.parts):  # a pair's forward is drawn above its backward
            rectangle = (
                (float(start), rank - ROW / 2 + half_index * height),
                float(stop - start),
                height,
            )
            cells[op] = Rectangle(*rectangle, facecolor=color(op), gid=str(op))
            ax.add_patch(cells[op])
    narrowest = (
        min(cell.get_width() for cell in cells.values() if cell.get_width()) * points_per_time_unit
    )
    for op, cell in cells.items():
        cell.set(edgecolor=EDGE, linewidth=min(0.6, 0.08 * narrowest))
        if op in panel.outlined:
            width = min(3.0, 0.15 * cell.get_width() * points_per_time_unit)
            cell.set(edgecolor="black", linewidth=width, zorder=1.5, joinstyle="miter")

    def fitting_font_size(label: str, cell: Rectangle) -> float:
        """Return the largest font size, in points, at which the label fits in the cell."""
        lines = label.split("\n")
        # In DejaVu Sans, a digit is 0.64 font sizes wide, and a line is 1.2 font sizes high.
        by_width = (cell.get_width() * points_per_time_unit - 2) / (0.66 * max(map(len, lines)))
        return min(by_width, (cell.get_height() * points_per_rank - 1) / (1.2 * len(lines)))

    visible_ops = [
        op for op, cell in cells.items() if cell.get_width() and cell.get_bbox().x1 <= end
    ]
    for label in panel.labels:
        font_sizes = {op: fitting_font_size(label(op), cells[op]) for op in visible_ops}
        if min(font_sizes.values(), default=0) >= page.MIN_FONT_SIZE:
            break
    size = min(page.SMALL, max(page.MIN_FONT_SIZE, min(font_sizes.values(), default=0)))
    # If some cells are too small, no cell of their kind gets a number, because gaps would mislead.
    too_small = {(op.kind, cells[op].get_height()) for op in visible_ops if font_sizes[op] < size}
    style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": size, "linespacing": 1.05}
    for op in visible_ops:
        if (op.kind, cells[op].get_height()) not in too_small:
            x, y = cells[op].get_center()
            ax.text(x, y, label(op), color=page.contrast_color(color(op)), **style)
    rank_axis(ax, num_ranks)
    page.panel_title(ax, panel.text)


def rank_axis(ax: Axes, num_ranks: int) -> None:
    """Set one tick per rank, and integer ticks on the time axis."""
    ax.set_yticks(range(num_ranks))
    ax.set_ylabel("rank", fontsize=TEXT)
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    ax.xaxis.set_major_formatter("{x:g}")


def lay_out(
    title: str,
    panels: Sequence[Panel],
    *,
    height_factor: float = 1.2,
    legend: Sequence[Artist] | None = None,
    **options: Any,
) -> Figure:
    """Draw a page of stacked timelines on one time axis. The axis label shows the durations of the
    operations, which must be the same in all panels. `height_factor` is the height of a panel as a
    multiple of grid_height(). `options` are passed to new_figure."""
    timelines = [panel.timeline for panel in panels]
    until = max(timeline.makespan for timeline in timelines)
    heights = [height_factor * grid_height(timeline) for timeline in timelines]
    legend = kind_legend(timelines) if legend is None else legend
    figure, axes = page.new_figure(title, heights, legend=legend, gap=0.5, **options)
    for ax, panel in zip(axes, panels, strict=True):
        draw_grid(ax, panel, until=until)
        ax.tick_params(labelbottom=ax is axes[-1])
    axes[-1].set_xlabel(f"time in units: {durations_text(timelines[-1])}", fontsize=TEXT)
    return figure


def idle_share_text(timeline: Timeline) -> str:
    """Return the idle share of the makespan as text, such as '27.3%'."""
    return percent(idle(timeline).makespan_fraction)


def idle_text(shares: Idle) -> str:
    """Return two idle shares as text: the share of the makespan and the share of the ranks'
    spans."""
    makespan, span = percent(shares.makespan_fraction), percent(shares.span_fraction)
    return f"{makespan} of the makespan, {span} of the spans"


def cost_text(timeline: Timeline) -> str:
    """Return text with a timeline's makespan, its idle share, and each rank's peak activations in
    microbatches."""
    held = ", ".join(map(number, peak_activations(timeline.schedule)))
    makespan = number(timeline.makespan)
    idle = idle_share_text(timeline)
    return f"ends at {makespan}, idle {idle}; most microbatches held, by rank: {held}"


def durations_text(timeline: Timeline) -> str:
    """Return text with the time that each pass of one microbatch takes on all of a rank's layers,
    such as 'F = 1, B = I + W = 1 + 1 = 2'."""
    costs = timeline.costs
    v = timeline.schedule.stages_per_rank
    first = costs.forward[0], costs.input_gradient[0], costs.weight_gradient[0]
    f, i, w, b = (number(v * duration) for duration in (*first, first[1] + first[2]))
    forwards_only = all(kind == "F" for kind, _ in timeline.schedule.microbatches_of)
    stage_note = "" if len(set(costs.forward)) == 1 else " on the first stage"
    backward = "" if forwards_only else f", B = I + W = {i} + {w} = {b}"
    return f"F = {f}{backward}{stage_note}"


def naive_pipeline(config: Config) -> Figure:
    """Draw the naive schedule, in which only one rank works at a time. Three microbatches fit on a
    page that a phone shows without scrolling."""
    few = {**config, "num_microbatches": min(3, config["num_microbatches"])}
    timeline = measure("naive", few).batch
    title = (
        f"One microbatch at a time: {timeline.schedule.num_ranks} ranks idle for "
        f"{idle_share_text(timeline)} of {number(timeline.makespan)} time units"
    )
    narrow: dict[str, Any] = {"full_width": 5.2, "left": 0.65, "right": 0.15}
    return lay_out(title, [Panel("", timeline)], height_factor=1.6, **narrow)


def microbatch_forward(config: Config) -> Figure:
    """Draw the forward passes of one batch, first in one piece and then split into microbatches
    that fill the pipeline."""
    m = config["num_microbatches"]
    unsplit_config = {**config, "num_microbatches": 1, "forward": config["forward"] * m}
    unsplit, split = (
        forwards_only(measure("gpipe", settings).batch) for settings in (unsplit_config, config)
    )
    title = (
        f"With {m} microbatches, the forward pass through {config['num_stages']} ranks ends at "
        f"time {number(split.makespan)} instead of {number(unsplit.makespan)}"
    )
    batch_label = f"0-{m - 1}" if m > 1 else "0"
    unsplit_title = f"The batch in one piece: ranks idle for {idle_share_text(unsplit)}"
    split_title = f"The same batch as {m} microbatches: ranks idle for {idle_share_text(split)}"
    panels = [Panel(unsplit_title, unsplit, [lambda _: batch_label]), Panel(split_title, split)]
    return lay_out(title, panels, height_factor=1.4)


def forwards_only(timeline: Timeline) -> Timeline:
    """Simulate only the forward passes of a timeline, and return the new timeline."""
    schedule = timeline.schedule
    orders = tuple(tuple(op for op in order if op.kind == "F") for order in schedule.flat)
    return simulate(replace(schedule, orders=orders), timeline.costs)


def microbatch_backward(config: Config) -> Figure:
    """Draw a whole GPipe batch: all forward passes, then all backward passes."""
    timeline = measure("gpipe", config).batch
    last = number(forwards_only(timeline).makespan)
    title = (
        f"GPipe: the last forward pass ends at time {last}, and the gradients return until "
        f"{number(timeline.makespan)}; ranks idle for {idle_share_text(timeline)}"
    )
    return lay_out(title, [Panel("", timeline)], height_factor=1.6)


def weight_versioning(config: Config) -> Figure:
    """Color cells by the weight version that each pass uses, with and without stashing. Outline a
    backward pass if its version differs from the version of its forward pass."""
    timeline = measure("pipedream", config).batch
    ops = list(timeline.schedule.ops())
    uses = {
        text: weight_use(timeline.schedule, POLICIES[policy], config["num_microbatches"])
        for text, policy in (("with stashing", "stash"), ("without stashing", "in-place"))
    }
    newest = max(use[op.stage].version(op) for use in uses.values() for op in ops)
    # The darkest shade is not used, because black outlines would be invisible on it.
    shades = [colormaps["viridis"]((v + 1) / (newest + 1)) for v in range(newest + 1)]
    panels = []
    counts = []
    for text, use in uses.items():
        version = {op: use[op.stage].version(op) for op in ops}
        forward = {op: use[op.stage].forward[op.microbatch] for op in ops}
        mismatched = [op for op in ops if version[op] != forward[op]]
        op_labels = {op: f"{op.kind}{op.microbatch}" for op in ops}
        version_labels = {op: f"{op_labels[op]}\nv{version[op]}" for op in ops}
        mismatch_labels = version_labels | {
            op: f"{version_labels[op]}\u2260{forward[op]}" for op in mismatched
        }
        color = {op: shades[version[op]] for op in ops}
        peaks = ", ".join(str(use[stage].peak_versions) for stage in sorted(use))
        title = f"{text.capitalize()}: versions kept, by rank: {peaks}"
        labels = [cells.__getitem__ for cells in (mismatch_labels, version_labels, op_labels)]
        panels.append(Panel(title, timeline, labels, color.__getitem__, set(mismatched)))
        counts.append(f"{len(mismatched)} {text}")
    backwards = sum(op.kind != "F" for op in ops)
    title = (
        f"Of {backwards} backward passes, {' and '.join(counts)} use different weights from "
        "their forward pass"
    )
    patch_style: dict[str, Any] = {"facecolor": "white", "edgecolor": "black", "linewidth": 3}
    outlined = Patch(**patch_style, label="B with different weights from its F")
    legend = [
        Patch(fc=shades[v], ec=EDGE, lw=0.6, label=f"version {v}")
        for v in range(0, newest + 1, -(-newest // 8) or 1)
    ]
    legend += [outlined, Patch(**IDLE_HATCH, label="idle")]
    return lay_out(title, panels, height_factor=1.9, legend=legend)
