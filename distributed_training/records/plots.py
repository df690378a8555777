"""Plots of run records that did the same work."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from distributed_training.records.compare import run_names
from distributed_training.records.display import GIB
from distributed_training.records.record import Record
from distributed_training.records.tables import COLUMNS

INK = "#010203"  # stands for the colour of the text
STYLES = ("-", "--", "-.", ":")
PHONE = 4.6  # inches
# Columns that tell two records of one strategy apart.
DISTINCTIONS = ("model", "batch", "precision", "compile", "processes")


def draw_plots(records: Sequence[Record], folder: Path) -> list[Path]:
    """loss.png, throughput.png and memory.png of records with results; the paths written.

    A plot that no record has figures for is not made. Raises OSError where nothing can be written.
    """
    return save_pngs(build_figures(records), folder)


def save_pngs(figures: Mapping[str, Figure], folder: Path) -> list[Path]:
    """NAME.png for each; the paths. Raises OSError where nothing can be written."""
    drawn = {folder / f"{name}.png": figure for name, figure in figures.items()}
    for path, figure in drawn.items():
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130, metadata={"Software": None})  # equal records, equal files
    return list(drawn)


def draw_svgs(records: Sequence[Record]) -> list[str]:
    """The same plots as <svg> elements."""
    return as_svgs(lambda: build_figures(records, width=PHONE), records[0].run_dir)


def as_svgs(build: Callable[[], Mapping[str, Figure]], where: str) -> list[str]:
    """Figures as <svg> elements in the colour of the text around; `where` tells several such lists
    on one page apart."""
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style: Any = dict.fromkeys((*inked, "legend.edgecolor"), INK)
    style |= dict.fromkeys(("figure.facecolor", "axes.facecolor", "legend.facecolor"), "none")
    nothing, pictures = dict.fromkeys(("Creator", "Date", "Format", "Type")), []
    with rc_context({**style, "svg.fonttype": "none"}):
        for name, figure in build().items():
            file = io.StringIO()
            with rc_context({"svg.hashsalt": f"{name} {where}"}):  # of its ids
                figure.savefig(file, format="svg", metadata=nothing)
            svg = file.getvalue().replace(INK, "currentColor")
            svg = svg[svg.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{name}"')
            # Ids of groups would repeat on a page of several figures; nothing refers to them.
            pictures.append(re.sub(r'(<g) id="[^"]*"', r"\1", svg))
    return pictures


def build_figures(records: Sequence[Record], width: float = 8) -> dict[str, Figure]:
    """Name -> figure, `width` inches wide, of what the records have figures for."""
    done = [record for record in records if record.performance]
    names, gpu = labels(done), [record.memory.get("peak_reserved_bytes") for record in done]
    host = [record.memory.get("peak_host_bytes") for record in done]
    on_gpu = any(size is not None for size in gpu)
    memory = "GPU memory taken by PyTorch" if on_gpu else "host memory"
    sizes = [None if size is None else size / GIB for size in (gpu if on_gpu else host)]
    speeds = [record.performance.get("tokens_per_s") for record in done]
    speed = "tokens per second, all processes (median step)"
    peak = f"peak {memory}, GiB, highest rank"
    found = {
        "loss": _draw_losses(names, done, width),
        "throughput": _draw_bars(names, speeds, "{:,.0f}", "#0072b2", speed, width),
        "memory": _draw_bars(names, sizes, "{:.1f}", "#d55e00", peak, width),
    }
    return {name: figure for name, figure in found.items() if figure is not None}


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


def _draw_losses(names: Sequence[str], records: Sequence[Record], width: float) -> Any:
    """Lines; a loss that was not finite is None in a record and a gap here."""
    figure = Figure(figsize=(width, 4.2), layout="constrained")  # needs no display, nor closing
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
    axes.legend(fontsize=8, ncols=2 if width > 6 else 1)
    return figure


def _draw_bars(
    names: Sequence[str],
    values: Sequence[float | None],
    form: str,
    colour: str,
    title: str,
    width: float,
) -> Any:
    """One horizontal bar a label, the first on top; labels without a value are left out."""
    bars = [(name, x) for name, x in zip(names, values, strict=True) if x is not None]
    if not bars:
        return None
    figure = Figure(figsize=(width, 1.2 + 0.34 * len(bars)), layout="constrained")
    axes = figure.subplots()
    labels, lengths = zip(*bars, strict=True)
    # By number: bars with equal labels would overlap.
    drawn = axes.barh(range(len(bars)), lengths, color=colour, tick_label=labels)
    axes.bar_label(drawn, [form.format(x) for x in lengths], padding=3, fontsize=8)
    axes.set_xlabel(title, fontsize=min(10, 1.9 * width))
    axes.set_xlim(0, (1 + 1.2 / width) * max(lengths))  # room for the labels
    axes.invert_yaxis()
    return figure
