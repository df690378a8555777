"""Pictures of what models learn: a run's losses, and a scaling law's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from distributed_training.records.record import Record


def draw_losses(panels: Mapping[str, Mapping[str, Record]]) -> Figure:
    """Losses by step: a panel for each title, a colour for each label in it; training thin,
    validation with dots. 900 pixels wide."""
    figure = Figure(figsize=(9, 3.4), layout="constrained", dpi=100)
    for axes, (title, runs) in zip(np.ravel(figure.subplots(1, len(panels))), panels.items(),
                                   strict=True):  # fmt: skip
        for place, (label, record) in enumerate(runs.items()):
            steps, losses = zip(*record.loss_curve, strict=True)
            colour = ("#0072b2", "#d55e00")[place]
            axes.plot(steps, losses, color=colour, linewidth=0.7, alpha=0.6)
            seen = [(one["step"], one["loss"]) for one in record.evaluations]
            axes.plot(*zip(*seen, strict=True), "o-", color=colour, markersize=3, label=label)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set(xlabel="steps", ylabel="loss, nats a token")
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=9)
    return figure


def draw_scaling_law(record: Mapping[str, Any]) -> Figure:
    """Of the record of scaling_law.py: loss by tokens, a line a size; and by parameters along
    equal FLOPs. Dots are measured, lines the fit. 900 pixels wide."""
    fit = record["summary"]["fit"]
    runs = list(record["runs"].values())

    def loss(n: Any, d: Any) -> Any:
        return fit["irreducible"] + fit["a"] / n ** fit["alpha"] + fit["b"] / d ** fit["beta"]

    figure = Figure(figsize=(9, 3.8), layout="constrained", dpi=100)
    left, right = figure.subplots(1, 2, sharey=True)
    sizes, tokens = (sorted({run[key] for run in runs}) for key in ("parameters", "tokens"))
    every_d = np.geomspace(tokens[0] / 1.5, tokens[-1] * 1.5)
    for place, size in enumerate(sizes):
        own = sorted((run["tokens"], run["loss"]) for run in runs if run["parameters"] == size)
        label = f"{size / 1e6:.1f}M"
        left.plot(*zip(*own, strict=True), "o", color=f"C{place}", label=label)
        left.plot(every_d, loss(size, every_d), color=f"C{place}", linewidth=1)
    left.set(xscale="log", xlabel="tokens", ylabel="validation loss, nats a token")
    left.set_xticks(tokens, labels=[f"{amount / 1e6:.1f}M" for amount in tokens])
    left.minorticks_off()
    left.legend(title="parameters", fontsize=8, frameon=False)
    every_n = np.geomspace(sizes[0] / 2, sizes[-1] * 2)
    for budget in _budgets(runs):
        wanted = budget / 6 / every_n  # tokens
        spread = every_n[(every_d[0] <= wanted) & (wanted <= every_d[-1])]
        losses = loss(spread, budget / 6 / spread)
        (line,) = right.plot(spread, losses, label=f"{budget:.0e} FLOPs")
        lowest = int(np.argmin(losses))
        if 0 < lowest < len(spread) - 1:
            right.plot(spread[lowest], losses[lowest], "v", color=line.get_color())
    right.set(xscale="log", xlabel="parameters, of the fit at equal FLOPs")
    right.legend(fontsize=8, frameon=False)
    return figure


def _budgets(runs: Sequence[Mapping[str, Any]]) -> Any:
    least, most = np.quantile([6 * run["parameters"] * run["tokens"] for run in runs], (0.1, 0.9))
    return np.geomspace(least, most, 5)
