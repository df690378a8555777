"""Plots of runs that did the same work: by layout, over seeds."""

import io
import statistics
import textwrap
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.figure import Figure

from distributed_training.records.record import Record
from distributed_training.records.tables import TOKENS_PER_S, Comparison, Layout, finite

STYLES = ("-", "--", "-.", ":")
INCHES = 6.4  # wide
NAME_WIDTH = 24  # characters of a line


def draw_pngs(comparison: Comparison) -> dict[str, bytes]:
    """Name -> PNG of each figure."""
    found = {}
    for name, figure in build_figures(comparison).items():
        file = io.BytesIO()
        figure.savefig(file, dpi=130, metadata={"Software": None})  # equal runs, equal files
        found[name] = file.getvalue()
    return found


def build_figures(comparison: Comparison) -> dict[str, Figure]:
    """Name -> figure, of what there are figures for."""
    layouts = comparison.finished
    found = {
        "loss": _losses(layouts, lambda r: [step for step, _ in r.loss_curve], "optimizer step"),
        "loss-by-time": _losses(layouts, lambda r: r.loss_seconds, "seconds of training"),
        "throughput": _speeds(layouts),
    }
    return {name: figure for name, figure in found.items() if figure is not None}


def _losses(
    layouts: Sequence[Layout], places: Callable[[Record], Sequence[float]], what: str
) -> Figure | None:
    """Means over the seeds: training as lines, with bands of one standard deviation to each side,
    validation as dots. A loss that was not finite is None in a record and a gap here."""
    figure = Figure(figsize=(INCHES, 4.2), layout="constrained")  # needs no display, nor closing
    axes = figure.subplots()
    for index, layout in enumerate(layouts):
        runs = [(places(r), [loss for _, loss in r.loss_curve]) for r in layout.done]
        shortest = min(min(len(x), len(y)) for x, y in runs)
        x = np.mean([x[:shortest] for x, _ in runs], axis=0)
        y = np.array([y[:shortest] for _, y in runs], dtype=float)
        if not np.isfinite(y).any():
            continue
        mean = y.mean(axis=0)
        colour = f"C{index % 10}"
        axes.plot(x, mean, STYLES[index % 4], color=colour, label=layout.name, linewidth=1.2,
                  marker="." if shortest == 1 else None)  # fmt: skip
        if len(runs) > 1:
            spread = y.std(axis=0, ddof=1)
            axes.fill_between(x, mean - spread, mean + spread, color=colour, alpha=0.2, linewidth=0)
        steps = [0, *(step for step, _ in layout.done[0].loss_curve[:shortest])]
        seen = [(row["step"], finite(row["loss"])) for r in layout.done for row in r.evaluations]
        at = np.interp([step for step, _ in seen], steps, [0, *x])
        axes.plot(at, [loss for _, loss in seen], "o", color=colour, markersize=5)
    if not axes.lines:
        return None
    axes.plot([], [], color="black", linewidth=1.2, label="training")
    axes.plot([], [], "o", color="black", markersize=5, label="validation")
    axes.set(xlabel=what, ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=2)
    return figure


def _speeds(layouts: Sequence[Layout]) -> Figure | None:
    """Bars of the means over the seeds, with standard deviations."""
    known = [layout for layout in layouts if TOKENS_PER_S.values(layout.done)]
    if not known:
        return None
    names = [textwrap.fill(layout.name, NAME_WIDTH) for layout in known]
    speeds = [TOKENS_PER_S.values(layout.done) for layout in known]
    means = [statistics.fmean(each) for each in speeds]
    spread = [statistics.stdev(each) if len(each) > 1 else 0.0 for each in speeds]
    tallest = max(name.count("\n") for name in names)
    size = (INCHES, 1.2 + (0.34 + 0.1 * tallest) * len(names))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    places = range(len(names))  # by number: bars with equal names would overlap
    bars = axes.barh(places, means, xerr=spread if any(spread) else None, color="#0072b2",
                     ecolor="#888888", capsize=3)  # fmt: skip
    axes.bar_label(bars, [f"{mean:,.0f}" for mean in means], padding=3, fontsize=8)
    axes.set_yticks(places, labels=names)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xticks([])  # the bars say it
    figure.supxlabel("tokens per second, all processes (median step)", fontsize=10)
    return figure
