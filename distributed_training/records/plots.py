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

Curve = Sequence[tuple[int, float | None]]
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
    if not done:
        return []
    names = labels(done)
    what, sizes = "GPU memory taken by PyTorch", [r.memory.get("peak_reserved_bytes") for r in done]
    if all(size is None for size in sizes):
        what, sizes = "host memory", [record.memory.get("peak_host_bytes") for record in done]
    folder.mkdir(parents=True, exist_ok=True)
    return [
        *_draw_losses(names, [record.loss_curve for record in done], folder / "loss.png"),
        *_draw_bars(names, [record.performance.get("tokens_per_s") for record in done],
                    folder / "throughput.png", "{:,.0f}", "#0072b2",
                    title="tokens per second, all processes (median step)"),
        *_draw_bars(names, [None if size is None else size / GIB for size in sizes],
                    folder / "memory.png", "{:.1f}", "#d55e00",
                    title=f"peak {what}, GiB, highest rank"),
    ]  # fmt: skip


def labels(records: Sequence[Record]) -> list[str]:
    """For each record its strategy and layout, with whatever else distinguishes the records; where
    all of that is equal, the run's folder, or its number by start where it left none.
    """
    telling = [text for text in DISTINCTIONS if len({text(record) for record in records}) > 1]
    shown = [COLUMNS["strategy"], *telling]
    found = [", ".join(text(record) for text in shown) for record in records]
    counts, seen = Counter(found), Counter[str]()
    for index in sorted(range(len(records)), key=lambda index: records[index].started_at):
        label, folder = found[index], Path(records[index].run_dir).name
        seen[label] += 1
        if counts[label] > 1:
            found[index] += f", {folder or f'run {seen[label]}'}"
    return found


def _draw_losses(names: Sequence[str], losses: Sequence[Curve], path: Path) -> list[Path]:
    """Lines; a loss that was not finite is None in a record and a gap here."""
    curves = list(zip(names, losses, strict=True))
    curves = [curve for curve in curves if any(loss is not None for _, loss in curve[1])]
    if not curves:
        return []
    figure, axes = _new_figure(height=4.2)
    for index, (label, curve) in enumerate(curves):
        steps = [step for step, _ in curve]
        heights = [math.nan if loss is None else loss for _, loss in curve]
        marker = "o" if len(curve) == 1 else ""
        axes.plot(steps, heights, STYLES[index % 4], label=label, linewidth=1.4, marker=marker)
    axes.set(xlabel="optimizer step", ylabel="training loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=2)
    return _save(figure, path)


def _draw_bars(
    names: Sequence[str], values: Sequence[float | None], path: Path, form: str, colour: str, *,
    title: str,
) -> list[Path]:  # fmt: skip
    """One horizontal bar a label, the first on top; labels without a value are left out."""
    bars = [bar for bar in zip(names, values, strict=True) if bar[1] is not None]
    if not bars:
        return []
    figure, axes = _new_figure(height=1.2 + 0.34 * len(bars))
    lengths = [value or 0.0 for _, value in bars]
    places = range(len(bars))  # by number: bars with equal labels would overlap
    drawn = axes.barh(places, lengths, color=colour, tick_label=[label for label, _ in bars])
    axes.bar_label(drawn, [form.format(x) for x in lengths], padding=3, fontsize=8)
    axes.set(xlabel=title, xlim=(0, 1.15 * max(lengths)))
    axes.invert_yaxis()
    return _save(figure, path)


def _new_figure(height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), layout="constrained")  # needs no display, nor closing
    return figure, figure.subplots()


def _save(figure: Any, path: Path) -> list[Path]:
    figure.savefig(path, dpi=130, metadata={"Software": None})  # equal records, equal files
    return [path]
