"""Plot the losses of training runs."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from distributed_training.records.record import Record


def draw_losses(panels: Mapping[str, Mapping[str, Record]], title: str) -> Figure:
    """Plot losses over steps in a figure that is 900 pixels wide, with a panel for each dataset
    and a color for each label. Training losses are thin lines, and validation losses are dots."""
    figure = Figure(figsize=(9, 3.6), layout="constrained", dpi=100)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    for axes, (text, runs) in zip(np.ravel(figure.subplots(1, len(panels))), panels.items(),
                                   strict=True):  # fmt: skip
        for index, (label, record) in enumerate(runs.items()):
            steps, losses = zip(*record.loss_curve, strict=True)
            color = ("#0072b2", "#d55e00")[index]
            axes.plot(
                steps, losses, color=color, linewidth=0.7, alpha=0.6, label=f"{label}, training"
            )
            points = [(e["step"], e["loss"]) for e in record.evaluations]
            axes.plot(*zip(*points, strict=True), "o-", color=color, markersize=3,
                      label=f"{label}, validation")  # fmt: skip
        axes.set_title(text, fontsize=9, loc="left")
        axes.set(xlabel="steps", ylabel="loss, nats per token")
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
    return figure
