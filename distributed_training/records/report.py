"""Comparisons with plots: for a terminal, as Markdown, as one HTML file; `report` of any runs."""

import argparse
import base64
import io
import os
import shutil
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from distributed_training.records.display import WIDTH, fill, fold, short_path
from distributed_training.records.record import RECORD_FILE, Record, load_record
from distributed_training.records.tables import MEASURED, Comparison, Layout, Table, group_by_work
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import given_path, require_writable

MAX_TABLES = 3
COMMAND = "python real_model_example.py report"
NAME_WIDTH = 26
# Given up in this order where a terminal is too narrow.
LEAST = (
    "MFU", "bits per byte", "validation perplexity", "ms per step", "runs", "peak RAM",
    "training loss",
)  # fmt: skip
STYLES = ("-", "--", "-.", ":")  # of curves
Figure = Any  # matplotlib's, which is slow to import
WORDS = {"run", "strategy", "layout", "status", "verdict", "mostly"}  # columns aligned left


@dataclass(frozen=True, slots=True)
class Section:
    title: str  # all that its runs have in common, on one line for a terminal
    notes: Sequence[str]
    tables: Sequence[Table]
    plots: Mapping[str, bytes] = field(default_factory=dict)  # name -> PNG
    heading: str = ""  # of a page; below it, `settings` as a small table
    settings: Mapping[str, str] = field(default_factory=dict)


def build_sections(comparisons: Sequence[Comparison]) -> list[Section]:
    """Notes, tables and plots of each; the plots' names are numbered where there are several."""
    found = []
    for number, each in enumerate(comparisons, 1):
        several = len(comparisons) > 1
        plots = {}
        for name, figure in build_figures(each).items():
            file = io.BytesIO()
            figure.savefig(file, dpi=130, metadata={"Software": None})  # equal runs, equal files
            plots[f"{name}-{number}" if several else name] = file.getvalue()
        named = each.settings.get("model") or each.work or "Runs"
        heading = f"{number}. {named}" if several else named
        section = Section(each.title, each.notes, each.tables(), plots, heading, each.settings)
        found.append(section)
    return found


def build_figures(comparison: Comparison) -> dict[str, Figure]:
    """Name -> figure, of what there are figures for."""
    layouts = comparison.finished
    found = {
        "loss": _losses(layouts, lambda r: [step for step, _ in r.loss_curve], "optimizer step"),
        "loss-by-time": _losses(layouts, lambda r: r.loss_seconds, "seconds of training"),
        "throughput": _speeds(layouts),
    }
    return {name: figure for name, figure in found.items() if figure is not None}


def _new_figure(height: float) -> tuple[Figure, Any]:
    """(a figure of so many inches, which needs no display, nor closing; its axes)."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(6.4, height), layout="constrained")
    return figure, figure.subplots()


def _losses(
    layouts: Sequence[Layout], places: Callable[[Record], Sequence[float]], what: str
) -> Figure | None:
    """Means over the seeds: training as lines, with bands of one standard deviation to each side,
    validation as dots. A loss that was not finite is None in a record and a gap here."""
    figure, axes = _new_figure(4.2)
    for index, layout in enumerate(layouts):
        runs = [(places(r), [loss for _, loss in r.loss_curve]) for r in layout.done]
        shortest = min(min(len(x), len(y)) for x, y in runs)
        x = np.mean([x[:shortest] for x, _ in runs], axis=0)
        y = np.array([y[:shortest] for _, y in runs], dtype=float)
        if not np.isfinite(y).any():
            continue
        mean = y.mean(axis=0)
        color = f"C{index % 10}"
        axes.plot(x, mean, STYLES[index % 4], color=color, label=layout.name, linewidth=1.2,
                  marker="." if shortest == 1 else None)  # fmt: skip
        if len(runs) > 1:
            spread = y.std(axis=0, ddof=1)
            axes.fill_between(x, mean - spread, mean + spread, color=color, alpha=0.2, linewidth=0)
        steps = [0, *(step for step, _ in layout.done[0].loss_curve[:shortest])]
        seen = [(row["step"], row["loss"]) for r in layout.done for row in r.evaluations]
        at, found = np.array(seen, dtype=float).reshape(-1, 2).T
        axes.plot(np.interp(at, steps, [0, *x]), found, "o", color=color, markersize=5)
    if not axes.lines:
        return None
    axes.plot([], [], color="black", linewidth=1.2, label="training")
    axes.plot([], [], "o", color="black", markersize=5, label="validation")
    axes.set(xlabel=what, ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=2)
    return figure


def _speeds(layouts: Sequence[Layout]) -> Figure | None:
    """Bars of the means over the seeds, with standard deviations."""
    tokens_per_s = MEASURED["tokens/s"]
    known = [layout for layout in layouts if tokens_per_s.values(layout.done)]
    if not known:
        return None
    names = [textwrap.fill(layout.name, 24) for layout in known]
    speeds = [tokens_per_s.values(layout.done) for layout in known]
    means = [statistics.fmean(each) for each in speeds]
    spread = [statistics.stdev(each) if len(each) > 1 else 0.0 for each in speeds]
    tallest = max(name.count("\n") for name in names)
    figure, axes = _new_figure(1.2 + (0.34 + 0.1 * tallest) * len(names))
    places = range(len(names))  # by number: bars with equal names would overlap
    bars = axes.barh(places, means, xerr=spread if any(spread) else None, color="#0072b2",
                     ecolor="#888888", capsize=3)  # fmt: skip
    axes.bar_label(bars, [f"{mean:,.0f}" for mean in means], padding=3, fontsize=8)
    axes.set_yticks(places, labels=names)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xticks([])  # the bars say it
    figure.supxlabel("tokens per second, all processes (median step)", fontsize=10)
    return figure


def terminal(section: Section, shared: Mapping[str, str] | None = None) -> str:
    """Title (without settings that are `shared`, and said), first table and notes; what a terminal
    has no room for are the least columns."""
    title = section.title
    if shared:
        own = {name: text for name, text in section.settings.items() if name not in shared}
        title = ": ".join(filter(None, [section.heading, in_words(own)]))
    width = shutil.get_terminal_size((WIDTH, 0)).columns
    columns = section.tables[0].columns
    for least in ("", *LEAST):
        columns = {name: cells for name, cells in columns.items() if name != least}
        headings = [name.replace("peak ", "").replace(" ", "\n", 1) for name in columns]
        text = tabulate(
            [headings, *zip(*columns.values(), strict=True)],  # as headings they get padding
            tablefmt="plain", disable_numparse=True, colalign=_align(columns),
            maxcolwidths=[NAME_WIDTH, *[None] * (len(columns) - 1)],
        )  # fmt: skip
        if max(map(len, text.splitlines())) <= width:
            break
    notes = [fold(note, width) for note in section.notes]
    return "\n".join([fold(title, width), text, *notes])


def _align(headers: Iterable[str]) -> list[str]:
    return ["left" if name in WORDS else "right" for name in headers]


def save_plots(sections: Sequence[Section], folder: Path) -> list[str]:
    """Write the plots into `folder`; the files' names. Raises OSError where that cannot be."""
    plots = {f"{name}.png": png for section in sections for name, png in section.plots.items()}
    for name, png in plots.items():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(png)
    return list(plots)


def shared_settings(sections: Sequence[Section]) -> dict[str, str]:
    """Return what the runs of several sections have in common; nothing for one section."""
    if len(sections) < 2:
        return {}
    common = set.intersection(*({*section.settings.items()} for section in sections))
    return dict(item for item in sections[0].settings.items() if item in common)


def in_words(settings: Mapping[str, str]) -> str:
    """Settings on one line."""
    return ", ".join(f"{name} {text}" for name, text in settings.items())


def page(form: str, title: str, heading: str, sections: Sequence[Section], note: str = "") -> str:
    """As Markdown, plots beside it; as HTML, one file: no network or script, light or dark. What
    the runs of all sections have in common stands above them, once."""
    shared = shared_settings(sections)

    def own_settings(section: Section) -> dict[str, str]:
        return {name: text for name, text in section.settings.items() if name not in shared}

    return fill(
        f"page.{form}.jinja", title=title, heading=heading, sections=sections, note=note,
        shared=shared, own_settings=own_settings, tabulate=tabulate, align=_align,
        b64encode=base64.b64encode,
    )  # fmt: skip


def find_records(paths: Sequence[Path]) -> list[Record]:
    """The records of runs, of folders of runs and of files, each once, named by where they lie; a
    folder without one gets a note. Raises UserError for a file that is none."""
    found: dict[Path, Record] = {}
    for path in map(given_path, paths):
        files = [path]
        passed_over: list[type[Exception]] = []
        if path.is_dir():
            files = sorted([*path.glob(f"[!.]*/{RECORD_FILE}"), *path.glob("*.json")])
            passed_over = [UserError]  # other files
        here = {}
        for file in map(Path, map(os.path.realpath, files)):  # runs/latest is a link
            place = file.parent if file.name == RECORD_FILE else file.with_suffix("")
            try:
                here[file] = load_record(file).model_copy(update={"run_dir": str(place)})
            except tuple(passed_over) as error:
                if file.name == RECORD_FILE:
                    print(f"note: {error}", file=sys.stderr)
        if not here:
            print(f"note: {path} holds no {RECORD_FILE}; left out", file=sys.stderr)
        found |= here
    return list(found.values())


def main(arguments: argparse.Namespace, output_dir: Path) -> int:
    """Show the runs that `arguments` name or, if they name none, those in `output_dir`; return the
    exit code."""
    paths = arguments.paths or [output_dir]
    records = find_records([path for path in paths if arguments.paths or path.is_dir()])
    if not records:
        fix = f"train first, or name runs: {COMMAND} FOLDER"
        raise UserError(f"no run record in {', '.join(map(short_path, paths))}", fix=fix)
    place = arguments.html or arguments.plots
    fix = f"give another place to {'--html' if arguments.html else '--plots'}"
    folder = place.parent if arguments.html else place
    require_writable(folder, fix, *([place.name] if arguments.html else []))
    comparisons = group_by_work(records)[: None if arguments.all else MAX_TABLES]
    sections = build_sections(comparisons)
    about = short_path(os.path.commonpath([r.run_dir for r in records]))
    if len(records) > 1:
        about = f"{len(records)} runs in {about}"
    left = len(records) - sum(len(comparison.records) for comparison in comparisons)
    note = f"left out: {left} older runs of other work; --all shows them" if left else ""
    shared = shared_settings(sections)
    above = "\n".join(filter(None, [about, fold(in_words(shared))]))
    texts = [above, *(terminal(section, shared) for section in sections), note]
    print("\n\n".join(filter(None, texts)), flush=True)
    wrote = short_path(place)
    if arguments.html:
        folder.mkdir(parents=True, exist_ok=True)
        place.write_text(page("html", "Training runs", about, sections, note), encoding="utf-8")
    else:
        names = ", ".join(save_plots(sections, place))
        wrote = names and f"{wrote}/{names}"
    if wrote:
        print(textwrap.fill(f"wrote {wrote}", WIDTH, break_long_words=False))
    return 0
