"""Plots of layouts that did the same work, over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from distributed_training.records.display import GIB
from distributed_training.records.plots import STYLES
from distributed_training.records.record import Record
from distributed_training.records.side_by_side import (
    MIB,
    Comparison,
    Layout,
    measured_peak,
    memory_parts,
    sent,
    tokens_per_s,
)


def build_figures(comparison: Comparison, width: float = 8) -> dict[str, Figure]:
    """Name -> figure, `width` inches wide, of what there are figures for."""
    layouts = comparison.finished
    found = {
        "loss-by-step": _losses(layouts, lambda r: [step for step, _ in r.loss_curve],
                                "optimizer step", width),
        "loss-by-time": _losses(layouts, lambda r: r.loss_seconds, "seconds of training", width),
        "throughput": _bars(layouts, width),
        "memory": _stacks(layouts, memory_parts, GIB, "GiB of the fullest process, predicted by "
                          "component", width, peaks=True),
        "sent": _stacks(layouts, sent, MIB, "MiB that a process sends a step, by formula", width),
    }  # fmt: skip
    return {name: figure for name, figure in found.items() if figure is not None}


def _losses(
    layouts: Sequence[Layout], places: Callable[[Record], Sequence[float]], what: str, width: float
) -> Figure | None:
    """Mean over the seeds, and a band of one standard deviation to each side."""
    figure = Figure(figsize=(width, 4.2), layout="constrained")
    axes = figure.subplots()
    for index, layout in enumerate(layouts):
        runs = [(list(places(r)), [loss for _, loss in r.loss_curve]) for r in layout.records]
        runs = [(x, y) for x, y in runs if y and len(x) == len(y)]
        if not runs:
            continue
        shortest = min(len(x) for x, _ in runs)
        x = np.mean([x[:shortest] for x, _ in runs], axis=0)
        y = np.array([y[:shortest] for _, y in runs], dtype=float)
        mean, colour = y.mean(axis=0), f"C{index % 10}"
        axes.plot(x, mean, STYLES[index % 4], color=colour, label=layout.name, linewidth=1.4)
        if len(runs) > 1:
            spread = y.std(axis=0, ddof=1)
            axes.fill_between(x, mean - spread, mean + spread, color=colour, alpha=0.2, linewidth=0)
    if not axes.lines:
        return None
    axes.set(xlabel=what, ylabel="training loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=2 if width > 6 else 1)
    return figure


def _frame(names: Sequence[str], width: float, extra: float = 0.0) -> tuple[Figure, Any]:
    """Room for one horizontal bar a name, the first on top."""
    figure = Figure(figsize=(width, 1.2 + extra + 0.34 * len(names)), layout="constrained")
    axes = figure.subplots()
    axes.set_yticks(range(len(names)), labels=names)
    axes.invert_yaxis()
    return figure, axes


def _bars(layouts: Sequence[Layout], width: float) -> Figure | None:
    shown = [layout for layout in layouts if layout.values(tokens_per_s)]
    if not shown:
        return None
    figure, axes = _frame([layout.name for layout in shown], width)
    runs = [layout.values(tokens_per_s) for layout in shown]
    means = [statistics.fmean(values) for values in runs]
    spread = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in runs]
    bars = axes.barh(range(len(shown)), means, xerr=spread if any(spread) else None,
                     color="#0072b2", ecolor="#888888", capsize=3)  # fmt: skip
    axes.bar_label(bars, [f"{mean:,.0f}" for mean in means], padding=3, fontsize=8)
    axes.set_xlim(0, (1 + 1.2 / width) * max(map(sum, zip(means, spread, strict=True))))
    axes.set_xlabel("tokens per second, all processes", fontsize=min(10, 1.9 * width))
    return figure


def _stacks(
    layouts: Sequence[Layout],
    parts_of: Callable[[Record], Mapping[str, float]],
    unit: float,
    what: str,
    width: float,
    *,
    peaks: bool = False,
) -> Figure | None:
    """Bars of parts on top of each other; `peaks`: with a mark at what was measured."""
    stacks = [parts_of(layout.records[0]) for layout in layouts]
    every = dict.fromkeys(name for stack in stacks for name in stack)
    names = [name for name in every if any(stack.get(name) for stack in stacks)]
    if not names:
        return None
    figure, axes = _frame([layout.name for layout in layouts], width, extra=0.8)
    ends = np.zeros(len(layouts))
    for index, name in enumerate(names):
        sizes = np.array([stack.get(name, 0) / unit for stack in stacks])
        axes.barh(range(len(layouts)), sizes, left=ends, color=f"C{index}", label=name)
        ends += sizes
    if peaks:
        found = [(layout.mean(measured_peak) or 0) / unit for layout in layouts]
        axes.plot(found, range(len(layouts)), "k|", markersize=14, label="measured peak")
    axes.margins(x=0.03)
    axes.set_xlabel(what, fontsize=min(10, 1.9 * width))
    figure.legend(loc="outside upper center", fontsize=8, ncols=4 if width > 6 else 3)
    return figure
