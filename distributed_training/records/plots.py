"""Plots of run records that did the same work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from distributed_training.records.compare import run_names
from distributed_training.records.display import GIB
from distributed_training.records.record import Record
from distributed_training.records.tables import COLUMNS

STYLES = ("-", "--", "-.", ":")
# Columns that tell two records of one strategy apart.
DISTINCTIONS = ("model", "batch", "precision", "compile", "processes")


def draw_plots(records: Sequence[Record], folder: Path) -> list[Path]:
    """loss.png, throughput.png and memory.png of records with results; the paths written.

    A plot that no record has figures for is not made. Raises OSError where nothing can be written.
    """
    done = [record for record in records if record.performance]
    names, gpu = labels(done), [record.memory.get("peak_reserved_bytes") for record in done]
    host = [record.memory.get("peak_host_bytes") for record in done]
    on_gpu = any(size is not None for size in gpu)
    memory = "GPU memory taken by PyTorch" if on_gpu else "host memory"
    sizes = [None if size is None else size / GIB for size in (gpu if on_gpu else host)]
    speeds = [record.performance.get("tokens_per_s") for record in done]
    speed = "tokens per second, all processes (median step)"
    peak = f"peak {memory}, GiB, highest rank"
    figures = {
        "loss.png": _draw_losses(names, done),
        "throughput.png": _draw_bars(names, speeds, "{:,.0f}", "#0072b2", speed),
        "memory.png": _draw_bars(names, sizes, "{:.1f}", "#d55e00", peak),
    }
    drawn = {folder / name: figure for name, figure in figures.items() if figure is not None}
    for path, figure in drawn.items():
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130, metadata={"Software": None})  # equal records, equal files
    return list(drawn)


def labels(records: Sequence[Record]) -> list[str]:
    """For each record its strategy and layout, with whatever else distinguishes the records; where
    all of that is equal, the run's folder, or its place in the list where it left none.
    """
    telling = [name for name in DISTINCTIONS if len({COLUMNS[name](r) for r in records}) > 1]
    found = [
        ", ".join([COLUMNS["strategy"](r), *(f"{name} {COLUMNS[name](r)}" for name in telling)])
        for r in records
    ]
    counts, names = Counter(found), run_names(records)
    return [
        f"{text}, {names[place] or f'run {place + 1}'}" if counts[text] > 1 else text
        for place, text in enumerate(found)
    ]


def _draw_losses(names: Sequence[str], records: Sequence[Record]) -> Any:
    """Lines; a loss that was not finite is None in a record and a gap here."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")  # needs no display, nor closing
    axes = figure.subplots()
    for index, (label, record) in enumerate(zip(names, records, strict=True)):
        curve = np.array(record.loss_curve, dtype=float).reshape(-1, 2)
        if np.isfinite(curve[:, 1]).any():
            marker = "o" * (len(curve) == 1)
            axes.plot(*curve.T, STYLES[index % 4], label=label, linewidth=1.4, marker=marker)
    if not axes.lines:
        return None
    axes.set(xlabel="optimizer step", ylabel="training loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=2)
    return figure


def _draw_bars(
    names: Sequence[str], values: Sequence[float | None], form: str, colour: str, title: str
) -> Any:
    """One horizontal bar a label, the first on top; labels without a value are left out."""
    bars = [(name, x) for name, x in zip(names, values, strict=True) if x is not None]
    if not bars:
        return None
    figure = Figure(figsize=(8, 1.2 + 0.34 * len(bars)), layout="constrained")
    axes = figure.subplots()
    labels, lengths = zip(*bars, strict=True)
    # By number: bars with equal labels would overlap.
    drawn = axes.barh(range(len(bars)), lengths, color=colour, tick_label=labels)
    axes.bar_label(drawn, [form.format(x) for x in lengths], padding=3, fontsize=8)
    axes.set(xlabel=title, xlim=(0, 1.15 * max(lengths)))
    axes.invert_yaxis()
    return figure
