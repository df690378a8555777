"""Plots of runs that did the same work: by layout, over seeds."""

from __future__ import annotations

import io
import re
import statistics
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context, rcParams
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from distributed_training.records.comparison import (
    Comparison,
    Layout,
    Parts,
    memory_parts,
    sent_bytes,
)
from distributed_training.records.display import GIB
from distributed_training.records.record import Record
from distributed_training.records.tables import Value, finite, measured_peak, tokens_per_s

INK = "#010203"  # stands for the colour of the text
STYLES = ("-", "--", "-.", ":")
WIDE = 8.0  # inches
PHONE = 4.6
NAME_WIDTH = 24  # characters of a line
MIB = 2**20


def save_pngs(comparison: Comparison, folder: Path, suffix: str = "") -> list[Path]:
    """NAME.png of each figure; the paths. Raises OSError where nothing can be written."""
    paths = []
    for name, figure in build_figures(comparison).items():
        folder.mkdir(parents=True, exist_ok=True)
        paths.append(folder / f"{name}{suffix}.png")
        figure.savefig(paths[-1], dpi=130, metadata={"Software": None})  # equal runs, equal files
    return paths


def draw_svgs(comparison: Comparison, where: str) -> list[str]:
    """The figures as <svg> elements in the colour of the text around; `where` tells several such
    lists on one page apart."""
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style: Any = dict.fromkeys((*inked, "legend.edgecolor"), INK)
    style |= dict.fromkeys(("figure.facecolor", "axes.facecolor", "legend.facecolor"), "none")
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    pictures = []
    with rc_context({**style, "svg.fonttype": "none"}):
        for name, figure in build_figures(comparison, PHONE).items():
            file = io.StringIO()
            with rc_context({"svg.hashsalt": f"{name} {where}"}):  # of its ids
                figure.savefig(file, format="svg", metadata=nothing)
            svg = file.getvalue().replace(INK, "currentColor")
            svg = svg[svg.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{name}"')
            # Ids of groups would repeat on a page of several figures; nothing refers to them.
            pictures.append(re.sub(r'(<g) id="[^"]*"', r"\1", svg))
    return pictures


def build_figures(comparison: Comparison, width: float = WIDE) -> dict[str, Figure]:
    """Name -> figure, `width` inches wide, of what there are figures for."""
    layouts = comparison.finished
    found = {
        "loss": _losses(layouts, lambda r: [step for step, _ in r.loss_curve],
                        "optimizer step", width),
        "loss-by-time": _losses(layouts, lambda r: r.loss_seconds, "seconds of training", width),
        "throughput": _bars(layouts, "tokens per second, all processes (median step)", width),
        "memory": _stacks(layouts, memory_parts, GIB, "GiB of the fullest process, predicted by "
                          "component", width, measured_peak),
        "sent": _stacks(layouts, sent_bytes, MIB, "MiB that a process sends a step, by formula",
                        width),
    }  # fmt: skip
    return {name: figure for name, figure in found.items() if figure is not None}


def _losses(
    layouts: Sequence[Layout], places: Callable[[Record], Sequence[float]], what: str, width: float
) -> Figure | None:
    """Means over the seeds: training as lines, with bands of one standard deviation to each side,
    validation as dots. A loss that was not finite is None in a record and a gap here."""
    figure = Figure(figsize=(width, 4.2), layout="constrained")  # needs no display, nor closing
    axes = figure.subplots()
    for index, layout in enumerate(layouts):
        runs = [(places(r), [loss for _, loss in r.loss_curve]) for r in layout.records]
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
        steps = [0, *(step for step, _ in layout.records[0].loss_curve[:shortest])]
        seen = [(row["step"], finite(row["loss"])) for r in layout.records for row in r.evaluations]
        at = np.interp([step for step, _ in seen], steps, [0, *x])
        axes.plot(at, [loss for _, loss in seen], "o", color=colour, markersize=5)
    if not axes.lines:
        return None
    ink = rcParams["text.color"]
    axes.plot([], [], color=ink, linewidth=1.2, label="training")
    axes.plot([], [], "o", color=ink, markersize=5, label="validation")
    axes.set(xlabel=what, ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=2 if width > 6 else 1)
    return figure


def _frame(layouts: Sequence[Layout], what: str, width: float) -> tuple[Figure, Any]:
    """Room for one horizontal bar a layout, the first on top; `what` they show stands below."""
    names = [textwrap.fill(layout.name, NAME_WIDTH) for layout in layouts]
    tallest = max(name.count("\n") for name in names)
    height = 1.2 + (0.34 + 0.1 * tallest) * len(layouts)
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    # By number: bars with equal names would overlap.
    axes.set_yticks(range(len(layouts)), labels=names)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(what, fontsize=min(10, 1.9 * width))
    return figure, axes


def _bars(layouts: Sequence[Layout], what: str, width: float) -> Figure | None:
    """Means over the seeds and their standard deviations; layouts without any are left out."""
    found = [(layout, [speed for r in layout.records if (speed := tokens_per_s(r)) is not None])
             for layout in layouts]  # fmt: skip
    shown = [(layout, values) for layout, values in found if values]
    if not shown:
        return None
    figure, axes = _frame([layout for layout, _ in shown], what, width)
    means = [statistics.fmean(values) for _, values in shown]
    spread = [statistics.stdev(values) if len(values) > 1 else 0.0 for _, values in shown]
    bars = axes.barh(range(len(shown)), means, xerr=spread if any(spread) else None,
                     color="#0072b2", ecolor="#888888", capsize=3)  # fmt: skip
    axes.bar_label(bars, [f"{mean:,.0f}" for mean in means], padding=3, fontsize=8)
    axes.set_xticks([])  # the bars say it
    return figure


def _stacks(
    layouts: Sequence[Layout],
    parts_of: Parts,
    unit: float,
    what: str,
    width: float,
    measured: Value = lambda r: None,
) -> Figure | None:
    """Bars of parts on top of each other, with a mark at what was measured."""
    stacks = [parts_of(layout.records[0]) for layout in layouts]
    names = list(dict.fromkeys(name for stack in stacks for name, size in stack.items() if size))
    if not names:
        return None
    figure, axes = _frame(layouts, what, width)
    ends = np.zeros(len(layouts))
    for index, name in enumerate(names):
        sizes = np.array([stack.get(name, 0) / unit for stack in stacks])
        axes.barh(range(len(layouts)), sizes, left=ends, color=f"C{index}", label=name)
        ends += sizes
    marks = [(peak / unit, place) for place, layout in enumerate(layouts)
             for r in layout.records if (peak := measured(r)) is not None]  # fmt: skip
    if marks:
        axes.plot(*zip(*marks, strict=True), "|", color=rcParams["text.color"], markersize=14,
                  label="measured peak")  # fmt: skip
    axes.set_xlim(0, 1.03 * axes.get_xlim()[1])
    axes.xaxis.set_major_locator(MaxNLocator(4))
    figure.legend(loc="outside upper center", fontsize=8, ncols=4 if width > 6 else 3)
    return figure
