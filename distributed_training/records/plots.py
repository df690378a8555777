"""Plot the losses of runs that did the same work."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from distributed_training.records.results import LayoutRow
from distributed_training.settings.files import MARK

LINE_STYLES = ("-", "--", "-.", ":")
Figure = Any  # matplotlib.figure.Figure, which is slow to import


def draw_losses(layouts: Sequence[LayoutRow]) -> bytes | None:
    """Return the plot of the losses as a PNG file, or None if there are no losses."""
    figure = plot_losses(layouts)
    if figure is None:
        return None
    file = io.BytesIO()
    # Replace matplotlib's version, so that equal runs produce equal files.
    figure.savefig(file, dpi=130, metadata={"Software": MARK})
    return file.getvalue()


def plot_losses(layouts: Sequence[LayoutRow]) -> Figure | None:
    """Plot the training losses of each run as a line, and its validation losses as dots. Runs of
    the same layout have the same color. A non-finite loss (None in a record) leaves a gap. Return
    None if there is no finite training loss."""
    import matplotlib.figure

    # This figure needs no display and need not be closed.
    figure = matplotlib.figure.Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for index, layout in enumerate(layouts):
        color = f"C{index % 10}"
        label: str | None = layout.name
        for r in layout.finished_records:
            steps, losses = np.array(r.loss_curve, dtype=float).reshape(-1, 2).T
            if not np.isfinite(losses).any():
                continue
            axes.plot(steps, losses, LINE_STYLES[index % 4], color=color, label=label,
                      linewidth=1.2, marker="." if len(steps) == 1 else None)  # fmt: skip
            label = None  # one entry in the legend per layout
            evaluations = [(row["step"], row["loss"]) for row in r.evaluations]
            eval_steps, eval_losses = np.array(evaluations, dtype=float).reshape(-1, 2).T
            axes.plot(
                eval_steps, eval_losses, "o", color=color, markersize=6, markeredgecolor="white",
                zorder=3,
            )  # fmt: skip
    if not axes.lines:
        return None
    axes.plot([], [], color="black", linewidth=1.2, label="training")
    axes.plot([], [], "o", color="black", markersize=5, label="validation")
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=2)
    return figure
