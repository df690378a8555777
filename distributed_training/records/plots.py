"""Plot the losses of runs that did the same work."""

import io
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distributed_training.records.record import METRICS_FILE, Record
from distributed_training.records.results import LayoutRow
from distributed_training.settings.files import MARK

LINE_STYLES = ("-", "--", "-.", ":")
Figure = Any  # matplotlib.figure.Figure, which is slow to import


def draw_plots(layouts: Sequence[LayoutRow]) -> dict[str, bytes]:
    """Return the plots as PNG files, keyed by name. Plots without data are left out."""
    plots = {}
    for name, figure in build_figures(layouts).items():
        file = io.BytesIO()
        # Replace matplotlib's version, so that equal runs produce equal files.
        figure.savefig(file, dpi=130, metadata={"Software": MARK})
        plots[name] = file.getvalue()
    return plots


def build_figures(layouts: Sequence[LayoutRow]) -> dict[str, Figure]:
    figures = {
        "loss": _plot_losses(
            layouts, lambda r: [step for step, _ in r.loss_curve], "optimizer step"
        ),
        "loss-by-time": _plot_losses(layouts, _read_seconds, "seconds of training"),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def _read_seconds(r: Record) -> list[float]:
    """Return the training time in seconds up to the end of each step, from the run's folder. Return
    [] if there is only the record."""
    file = Path(r.run_dir, METRICS_FILE)
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return [*itertools.accumulate(json.loads(line)["step_time_s"] for line in lines)]


def _new_figure(height: float) -> tuple[Figure, Any]:
    """Return a figure with the given height in inches, and its axes. The figure needs no display
    and need not be closed."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(6.4, height), layout="constrained")
    return figure, figure.subplots()


def _plot_losses(
    layouts: Sequence[LayoutRow], x_values: Callable[[Record], Sequence[float]], x_label: str
) -> Figure | None:
    """Plot the training losses of each run as a line, and its validation losses as dots. Runs of
    the same layout have the same color. A non-finite loss (None in a record) leaves a gap. Return
    None if there is no finite training loss."""
    figure, axes = _new_figure(4.2)
    for index, layout in enumerate(layouts):
        color = f"C{index % 10}"
        label: str | None = layout.name
        for r in layout.finished_records:
            x = x_values(r)
            y = np.array([loss for _, loss in r.loss_curve], dtype=float)
            if len(x) != len(y) or not np.isfinite(y).any():
                continue
            axes.plot(x, y, LINE_STYLES[index % 4], color=color, label=label, linewidth=1.2,
                      marker="." if len(x) == 1 else None)  # fmt: skip
            label = None  # one entry in the legend per layout
            steps = [0, *(step for step, _ in r.loss_curve)]
            evaluations = [(row["step"], row["loss"]) for row in r.evaluations]
            eval_steps, eval_losses = np.array(evaluations, dtype=float).reshape(-1, 2).T
            axes.plot(
                np.interp(eval_steps, steps, [0, *x]), eval_losses, "o", color=color, markersize=6,
                markeredgecolor="white", zorder=3,
            )  # fmt: skip
    if not axes.lines:
        return None
    axes.plot([], [], color="black", linewidth=1.2, label="training")
    axes.plot([], [], "o", color="black", markersize=5, label="validation")
    axes.set(xlabel=x_label, ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=2)
    return figure
