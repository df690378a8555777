"""Plots of run records. Each shows the records that hold its figure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from distributed_training.tables import COLUMNS

Record = dict[str, Any]
GIB = 2**30
STYLES = ("-", "--", "-.", ":")
# What tells two records of one strategy apart, as a label shows it.
DISTINCTIONS: tuple[Callable[[Record], str], ...] = (
    lambda r: r["config"]["model"],
    lambda r: f"{r['batch']['micro_batch_size']} x {r['config']['max_length']}",
    lambda r: r["config"]["precision"],
    lambda r: "compiled" if r["config"]["compile"] else "eager",
    lambda r: f"{r['world_size']} proc.",
)


def draw_plots(records: Sequence[Record], folder: Path) -> list[Path]:
    """loss.png, throughput.png and memory.png of records with results; the paths written.

    A plot that no record has figures for is not made. Raises OSError where nothing can be written.
    """
    done = [record for record in records if "performance" in record]
    named = list(zip(labels(done), done, strict=True))
    written = [
        _draw_losses(named, folder / "loss.png"),
        _draw_bars(
            [(label, record["performance"]["tokens_per_s"]) for label, record in named],
            folder / "throughput.png",
            title="tokens per second, all processes (median step)",
            form="{:,.0f}",
            colour="#0072b2",
        ),
        _draw_memory(named, folder / "memory.png"),
    ]
    return [path for path in written if path is not None]


def labels(records: Sequence[Record]) -> list[str]:
    """For each record its strategy and layout, with whatever else distinguishes the records; at
    last, where all of that is equal, the run's folder, or its number by start where it left none.
    """
    telling = [text for text in DISTINCTIONS if len({text(record) for record in records}) > 1]
    found = [
        ", ".join([COLUMNS["strategy"](record), *(text(record) for text in telling)])
        for record in records
    ]
    counts, seen = Counter(found), Counter[str]()
    for index in sorted(range(len(records)), key=lambda index: records[index]["started_at"]):
        label, folder = found[index], Path(records[index]["run_dir"]).name
        seen[label] += 1
        if counts[label] > 1:
            found[index] += f", {folder or f'run {seen[label]}'}"
    return found


def _draw_losses(named: Sequence[tuple[str, Record]], path: Path) -> Path | None:
    """Lines; a loss that was not finite is null in a record and a gap here."""
    curves = [(label, record["loss_curve"]) for label, record in named]
    curves = [curve for curve in curves if any(loss is not None for _, loss in curve[1])]
    if not curves:
        return None
    figure, axes = _new_figure(height=4.2)
    for index, (label, curve) in enumerate(curves):
        steps = [step for step, _ in curve]
        losses = [math.nan if loss is None else loss for _, loss in curve]
        marker = "o" if len(curve) == 1 else ""
        axes.plot(steps, losses, STYLES[index % 4], label=label, linewidth=1.4, marker=marker)
    axes.set(xlabel="optimizer step", ylabel="training loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=2)
    return _save(figure, path)


def _draw_memory(named: Sequence[tuple[str, Record]], path: Path) -> Path | None:
    """GPU memory of the records that measured it, where one did; else host memory."""
    on_gpu = any(record["memory"]["peak_reserved_bytes"] is not None for _, record in named)
    key = "peak_reserved_bytes" if on_gpu else "peak_host_bytes"
    what = "GPU memory taken by PyTorch" if on_gpu else "host memory"
    sizes = [(label, record["memory"][key]) for label, record in named]
    return _draw_bars(
        [(label, None if size is None else size / GIB) for label, size in sizes],
        path,
        title=f"peak {what}, GiB, highest rank",
        form="{:.1f}",
        colour="#d55e00",
    )


def _draw_bars(
    named: Sequence[tuple[str, float | None]], path: Path, *, title: str, form: str, colour: str
) -> Path | None:
    """One horizontal bar a label, the first on top; labels without a value are left out."""
    bars = [(label, value) for label, value in named if value is not None]
    if not bars:
        return None
    figure, axes = _new_figure(height=1.2 + 0.34 * len(bars))
    values = [value for _, value in bars]
    places = range(len(bars))  # by number: bars of one label would lie over each other
    drawn = axes.barh(places, values, color=colour, tick_label=[label for label, _ in bars])
    axes.bar_label(drawn, [form.format(value) for value in values], padding=3, fontsize=8)
    axes.set(xlabel=title, xlim=(0, 1.15 * max(values)))
    axes.invert_yaxis()
    return _save(figure, path)


def _new_figure(height: float) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(8, height), layout="constrained")


def _save(figure: Any, path: Path) -> Path:
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(path, dpi=130, metadata={"Software": None})  # equal records, equal files
    finally:
        plt.close(figure)
    return path
