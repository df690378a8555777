"""Pictures of timelines: ranks from top to bottom, time from left to right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from pipedream.draw.data import wrong_backwards
from pipedream.draw.grid import (
    IDLE_HATCH,
    draw_grid,
    kind_legend,
    microbatch_number,
    points_per_unit,
    row_height,
)
from pipedream.draw.page import EDGE, SMALL, TEXT, WIDTH, new_figure, number, percent, save
from pipedream.schedules.ops import FORWARD, Op
from pipedream.schedules.policies import WeightUse
from pipedream.simulate.comparison import Refused, Row
from pipedream.simulate.measures import Idle, idle, peak_activations
from pipedream.simulate.simulator import Timeline

STEADY = "Batch after batch: each rank starts its next batch once its own work on the last is done"


def draw_naive(timeline: Timeline, path: Path) -> Figure:
    """One microbatch at a time: most of the picture is idle."""
    shares, p = idle(timeline), timeline.schedule.num_ranks
    title = (
        f"One microbatch at a time: {p} ranks idle {percent(shares.makespan_fraction)} of "
        f"{number(timeline.makespan)} time units"
    )
    return _single(timeline, title, path)


def draw_microbatch_backward(timeline: Timeline, path: Path) -> Figure:
    """A whole GPipe batch: all forwards, then all backwards."""
    shares, m = idle(timeline), timeline.schedule.num_microbatches
    last = max(e.end for e in timeline.all_events() for op in e.item.parts if op.kind == FORWARD)
    title = (
        f"GPipe, {m} microbatches: forwards until time {number(last)}, backwards until "
        f"{number(timeline.makespan)}; ranks idle {percent(shares.makespan_fraction)}"
    )
    return _single(timeline, title, path)


def _single(timeline: Timeline, title: str, path: Path) -> Figure:
    p = timeline.schedule.num_ranks
    figure, (ax,) = new_figure(
        title, [1.6 * p * row_height(p)], legend=kind_legend([timeline]), head=0.2
    )
    draw_grid(ax, timeline)
    time_label(ax, timeline)
    return save(figure, path)


def draw_microbatch_forward(whole: Timeline, cut: Timeline, path: Path) -> Figure:
    """How microbatches fill the pipeline: the forward half of one batch, uncut and cut."""
    p, m = cut.schedule.num_ranks, cut.schedule.num_microbatches
    title = (
        f"Cut into {m} microbatches, the forward pass through {p} ranks ends at time "
        f"{number(cut.makespan)} instead of {number(whole.makespan)}"
    )
    figure, axes = new_figure(
        title, [1.4 * p * row_height(p)] * 2, legend=kind_legend([cut]), head=0.45
    )
    texts = ("The batch in one piece", f"The same batch as {m} microbatches")
    labels = (lambda op: f"0-{m - 1}" if m > 1 else "0", microbatch_number)
    for ax, timeline, text, label in zip(axes, (whole, cut), texts, labels, strict=True):
        draw_grid(ax, timeline, until=max(whole.makespan, cut.makespan), labels=(label,))
        panel_title(ax, f"{text}: ranks idle {percent(idle(timeline).makespan_fraction)}")
    time_label(axes[-1], cut)
    return save(figure, path)


def draw_all_schedules(
    groups: Sequence[Sequence[Row]], refused: Sequence[Refused], path: Path
) -> Figure:
    """One batch under every order, on one time axis. `groups` are rows with equal orders."""
    timelines = [group[0].batch for group in groups]
    p, m = timelines[0].schedule.num_ranks, timelines[0].schedule.num_microbatches
    # Naive takes so much longer than the others that on its scale they would all look alike.
    spans = sorted(timeline.makespan for timeline in timelines)
    until = spans[-2] if len(spans) > 1 and spans[-1] > 2 * spans[-2] else spans[-1]
    best = min(timelines, key=lambda timeline: idle(timeline).makespan_fraction)
    worst = max(timelines, key=lambda timeline: idle(timeline).makespan_fraction)
    title = (
        f"One batch of {m} microbatches on {p} ranks: from "
        f"{percent(idle(worst).makespan_fraction)} idle ({_title_of(groups, worst)}) to "
        f"{percent(idle(best).makespan_fraction)} ({_title_of(groups, best)})"
    )
    figure, axes = new_figure(
        title, [_height(timeline) for timeline in timelines], legend=kind_legend(timelines),
        head=0.45, gap=0.5, notes=refusals(refused),
    )  # fmt: skip
    for ax, group, timeline in zip(axes, groups, timelines, strict=True):
        draw_grid(ax, timeline, until=until)
        names = _names(group)
        text = f"{names}: ends at {number(timeline.makespan)}, idle {idle_text(idle(timeline))}"
        panel_title(
            ax, text + (f"; cut off at {number(until)}" if timeline.makespan > until else "")
        )
    for ax in axes[:-1]:
        ax.tick_params(labelbottom=False)
    time_label(axes[-1], timelines[0])
    return save(figure, path)


def _height(timeline: Timeline) -> float:
    """Inches: half as much again where operations in pairs share a row."""
    p = timeline.schedule.num_ranks
    pairs = any(len(event.item.parts) > 1 for event in timeline.all_events())
    return p * row_height(p) * (1.5 if pairs else 1)


def _title_of(groups: Sequence[Sequence[Row]], timeline: Timeline) -> str:
    return next(group[0].title for group in groups if group[0].batch is timeline)


def _names(group: Sequence[Row]) -> str:
    """'1F1B with flush = PipeDream, ...': an order's name, and who else runs it."""
    if len(group) == 1:
        return group[0].title
    others = len(group) - 1
    return f"{group[0].title} (and {group[1].title}" + (
        f" with its {others - 1} variants)" if others > 1 else ")"
    )


def idle_text(shares: Idle) -> str:
    """Both idle shares: of the makespan, and of the ranks' own spans."""
    return (
        f"{percent(shares.makespan_fraction)} of the makespan, "
        f"{percent(shares.span_fraction)} of the spans"
    )


def cost_text(timeline: Timeline) -> str:
    """When a timeline ends, what share of it is idle, and what each rank holds."""
    held = ", ".join(map(number, peak_activations(timeline.schedule)))
    share = percent(idle(timeline).makespan_fraction)
    ends = number(timeline.makespan)
    return f"ends at {ends}, idle {share}; microbatches held at most by rank {held}"


def panel_title(ax: Axes, text: str) -> None:
    ax.set_title(text, fontsize=TEXT, loc="left", pad=5)


def time_label(ax: Axes, timeline: Timeline) -> None:
    """Names the time axis and its unit."""
    ax.set_xlabel(f"time in units: {durations_text(timeline)}", fontsize=TEXT)


def durations_text(timeline: Timeline) -> str:
    """What one microbatch takes on a rank's whole share: 'F = 1, B = I + W = 1 + 1 = 2'."""
    costs, v = timeline.costs, timeline.schedule.stages_per_rank
    both = costs.input_gradient[0] + costs.weight_gradient[0]
    f, i, w, b = (
        number(v * each)
        for each in (costs.forward[0], costs.input_gradient[0], costs.weight_gradient[0], both)
    )
    forwards_only = all(op.kind == FORWARD for op in timeline.schedule.ops())
    where = "" if len(set(costs.forward)) == 1 else " on the first stage"
    return f"F = {f}" + ("" if forwards_only else f", B = I + W = {i} + {w} = {b}") + where


def refusals(refused: Sequence[Refused]) -> list[str]:
    """Notes on which schedules this size does not allow, and why."""
    return [f"Not possible here: {one.reason.partition(';')[0]}" for one in refused]


def draw_weight_versioning(
    timeline: Timeline, uses: Sequence[tuple[str, dict[int, WeightUse]]], path: Path
) -> Figure:
    """Cells coloured by the weight version that each pass uses, one panel per way of training.

    `uses` has (panel's text, stage -> versions). A backward pass whose version is not its forward
    pass's is outlined.
    """
    p = timeline.schedule.num_ranks
    backwards = sum(op.kind != FORWARD for op in timeline.schedule.ops())
    counts = " and ".join(f"{len(wrong_backwards(use))} {text}" for text, use in uses)
    newest = max(v for _, use in uses for one in use.values()
                 for v in (*one.forward.values(), *one.backward.values()))  # fmt: skip
    # The darkest shade is left out: black outlines would not show on it.
    shades = [colormaps["viridis"]((v + 1) / (newest + 1)) for v in range(newest + 1)]
    palette = ListedColormap(shades)
    title = (
        f"Of {backwards} backward passes, {counts} see other weights than their forward pass did"
    )
    legend: list[Artist] = [
        Patch(
            facecolor="white", edgecolor="black", linewidth=3, label="B on other weights than its F"
        ),
        Patch(**IDLE_HATCH, label="idle"),
    ]
    figure, axes = new_figure(
        title, [1.9 * p * row_height(p)] * len(uses), legend=legend, head=0.45, right=1.25
    )
    for ax, (text, use) in zip(axes, uses, strict=True):
        _draw_versions(ax, timeline, use, palette)
        peaks = ", ".join(str(use[stage].peak_versions) for stage in sorted(use))
        panel_title(ax, f"{text[:1].upper()}{text[1:]}: versions kept by rank {peaks}")
    time_label(axes[-1], timeline)
    _version_bar(figure, axes, palette)
    return save(figure, path)


def _draw_versions(
    ax: Axes, timeline: Timeline, use: dict[int, WeightUse], palette: ListedColormap
) -> None:
    def version(op: Op) -> int:
        versions = use[op.stage].forward if op.kind == FORWARD else use[op.stage].backward
        return versions[op.microbatch]

    def told(op: Op) -> str:
        own, first = version(op), use[op.stage].forward[op.microbatch]
        return f"v{own}" if own == first else f"v{own}\u2260{first}"

    draw_grid(
        ax,
        timeline,
        colour=lambda op: palette(version(op)),
        labels=(
            lambda op: f"{op.kind}{op.microbatch}\n{told(op)}",
            lambda op: f"{op.kind}{op.microbatch}\nv{version(op)}",
            lambda op: f"{op.kind}{op.microbatch}",
        ),
    )
    wrong = {f"{stage}B{i}" for stage, i in wrong_backwards(use)}
    for patch in ax.patches:
        if isinstance(patch, Rectangle) and patch.get_gid() in wrong:
            width = min(3.0, 0.15 * patch.get_width() * points_per_unit(ax)[0])
            patch.set(edgecolor="black", linewidth=width, zorder=1.5, joinstyle="miter")


def _version_bar(figure: Figure, axes: Sequence[Axes], palette: ListedColormap) -> None:
    boxes = [ax.get_position() for ax in axes]
    bottom, top = boxes[-1].y0, boxes[0].y1
    bar_axes = figure.add_axes((boxes[0].x1 + 0.25 / WIDTH, bottom, 0.22 / WIDTH, top - bottom))
    norm = BoundaryNorm([v - 0.5 for v in range(palette.N + 1)], palette.N)
    bar = figure.colorbar(ScalarMappable(norm=norm, cmap=palette), cax=bar_axes)
    bar.locator = MaxNLocator(nbins=12, integer=True)
    bar.minorticks_off()
    bar.update_ticks()
    bar.ax.tick_params(labelsize=SMALL)
    bar.set_label("weight version", fontsize=TEXT)
    bar.outline.set_edgecolor(EDGE)
