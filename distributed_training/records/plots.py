"""Plots of run records. Each shows the records that hold its figure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from distributed_training.records.display import GIB
from distributed_training.records.schema import Record
from distributed_training.records.tables import COLUMNS

STYLES = ("-", "--", "-.", ":")
# What tells two records of one strategy apart, as a label shows it.
DISTINCTIONS: tuple[Callable[[Record], str], ...] = (
    lambda r: r.config["model"],
    COLUMNS["batch"],
    COLUMNS["precision"],
    lambda r: "compiled" if r.config["compile"] else "eager",
    lambda r: f"{r.world_size} proc.",
)


def draw_plots(records: Sequence[Record], folder: Path) -> list[Path]:
    """loss.png, throughput.png and memory.png of records with results; the paths written.

    A plot that no record has figures for is not made. Raises OSError where nothing can be written.
    """
    done = [record for record in records if record.has_results]
    names, gpu = labels(done), [record.memory.get("peak_reserved_bytes") for record in done]
    host = [record.memory.get("peak_host_bytes") for record in done]
    on_gpu = any(size is not None for size in gpu)
    what = "GPU memory taken by PyTorch" if on_gpu else "host memory"
    sizes = [None if size is None else size / GIB for size in (gpu if on_gpu else host)]
    speeds = [record.performance.get("tokens_per_s") for record in done]
    speed = "tokens per second, all processes (median step)"
    figures = {
        "loss.png": _draw_losses(names, done),
        "throughput.png": _draw_bars(names, speeds, "{:,.0f}", "#0072b2", speed),
        "memory.png": _draw_bars(
            names, sizes, "{:.1f}", "#d55e00", f"peak {what}, GiB, highest rank"
        ),
    }
    drawn = {folder / name: figure for name, figure in figures.items() if figure is not None}
    for path, figure in drawn.items():
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130, metadata={"Software": None})  # equal records, equal files
    return list(drawn)


def labels(records: Sequence[Record]) -> list[str]:
    """For each record its strategy and layout, with whatever else distinguishes the records; where
    all of that is equal, the run's folder, or its number by start where it left none.
    """
    telling = [text for text in DISTINCTIONS if len({text(record) for record in records}) > 1]
    found = [", ".join(text(r) for text in (COLUMNS["strategy"], *telling)) for r in records]
    counts, seen = Counter(found), Counter[str]()
    for index in sorted(range(len(records)), key=lambda index: records[index].started_at):
        label, folder = found[index], Path(records[index].run_dir).name
        seen[label] += 1
        if counts[label] > 1:
            found[index] += f", {folder or f'run {seen[label]}'}"
    return found


def _draw_losses(names: Sequence[str], records: Sequence[Record]) -> Any:
    """Lines; a loss that was not finite is None in a record and a gap here."""
    figure, axes = _new_figure(height=4.2)
    for index, (label, record) in enumerate(zip(names, records, strict=True)):
        heights = [math.nan if loss is None else loss for _, loss in record.loss_curve]
        if not all(map(math.isnan, heights)):
            steps, marker = [step for step, _ in record.loss_curve], "o" * (len(heights) == 1)
            axes.plot(steps, heights, STYLES[index % 4], label=label, linewidth=1.4, marker=marker)
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
    figure, axes = _new_figure(height=1.2 + 0.34 * len(bars))
    labels, lengths = zip(*bars, strict=True)
    # By number: bars with equal labels would overlap.
    drawn = axes.barh(range(len(bars)), lengths, color=colour, tick_label=labels)
    axes.bar_label(drawn, [form.format(x) for x in lengths], padding=3, fontsize=8)
    axes.set(xlabel=title, xlim=(0, 1.15 * max(lengths)))
    axes.invert_yaxis()
    return figure


def _new_figure(height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), layout="constrained")  # needs no display, nor closing
    return figure, figure.subplots()
