"""Show comparisons of runs on a terminal, in Markdown and in HTML. This module implements the
command `report`."""

import argparse
import base64
import io
import os
import shutil
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from distributed_training.records.display import WIDTH, fill_template, fold, short_path
from distributed_training.records.record import RECORD_FILE, Record, load_record
from distributed_training.records.tables import (
    MEASURED,
    Comparison,
    LayoutRow,
    Table,
    group_by_work,
)
from distributed_training.settings.errors import UserError, print_stderr, printable
from distributed_training.settings.files import plural, require_writable, resolve_user_path

MAX_TABLES = 3
COMMAND = "python real_model_example.py report"
NAME_WIDTH = 26
# Columns that are left out of the table on a narrow terminal, in this order
DROPPABLE_COLUMNS = (
    "MFU", "bits per byte", "validation perplexity", "ms per step", "runs", "peak RAM",
    "training loss",
)  # fmt: skip
LINE_STYLES = ("-", "--", "-.", ":")
Figure = Any  # matplotlib.figure.Figure, which is slow to import
# Columns that are left-aligned
TEXT_COLUMNS = {"run", "strategy", "layout", "status", "verdict", "bottleneck"}


@dataclass(frozen=True, slots=True)
class Section:
    """Tables and plots for runs that did the same work."""

    title: str  # settings that the runs share, on one line, for a terminal
    notes: Sequence[str]
    tables: Sequence[Table]
    plots: Mapping[str, bytes] = field(default_factory=dict)  # name -> PNG
    heading: str = ""  # heading on a page
    # Settings for a small table below the heading
    settings: Mapping[str, str] = field(default_factory=dict)


def build_sections(comparisons: Sequence[Comparison]) -> list[Section]:
    """Return one section per comparison. If there are several sections, plot names are numbered."""
    sections = []
    is_numbered = len(comparisons) > 1
    for number, comparison in enumerate(comparisons, 1):
        plots = {}
        for name, figure in build_figures(comparison).items():
            file = io.BytesIO()
            # Leave out matplotlib's version, so that equal runs produce equal files.
            figure.savefig(file, dpi=130, metadata={"Software": None})
            plots[f"{name}-{number}" if is_numbered else name] = file.getvalue()
        settings = comparison.settings
        heading = settings.get("model") or comparison.work_description or "Runs"
        if is_numbered:
            heading = f"{number}. {heading}"
        section = Section(
            comparison.title, comparison.notes, comparison.tables(), plots, heading, settings
        )
        sections.append(section)
    return sections


def build_figures(comparison: Comparison) -> dict[str, Figure]:
    """Return the plots by name. Plots without data are left out."""
    layouts = comparison.finished
    figures = {
        "loss": _plot_losses(
            layouts, lambda r: [step for step, _ in r.loss_curve], "optimizer step"
        ),
        "loss-by-time": _plot_losses(layouts, lambda r: r.loss_seconds, "seconds of training"),
        "throughput": _plot_speeds(layouts),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def _new_figure(height: float) -> tuple[Figure, Any]:
    """Return a figure with the given height in inches, and its axes. The figure needs no display
    and need not be closed."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(6.4, height), layout="constrained")
    return figure, figure.subplots()


def _plot_losses(
    layouts: Sequence[LayoutRow], x_values: Callable[[Record], Sequence[float]], x_label: str
) -> Figure | None:
    """Plot training losses as lines: means over the seeds, with bands of one standard deviation.
    Plot the validation losses of all runs as dots. A non-finite loss (None in a record) leaves a
    gap. Return None if there is no finite training loss."""
    figure, axes = _new_figure(4.2)
    for index, layout in enumerate(layouts):
        runs = [(x_values(r), [loss for _, loss in r.loss_curve]) for r in layout.finished_records]
        shortest = min(min(len(x), len(y)) for x, y in runs)
        x = np.mean([x[:shortest] for x, _ in runs], axis=0)
        y = np.array([y[:shortest] for _, y in runs], dtype=float)
        if not np.isfinite(y).any():
            continue
        mean = y.mean(axis=0)
        color = f"C{index % 10}"
        axes.plot(x, mean, LINE_STYLES[index % 4], color=color, label=layout.name, linewidth=1.2,
                  marker="." if shortest == 1 else None)  # fmt: skip
        if len(runs) > 1:
            std = y.std(axis=0, ddof=1)
            axes.fill_between(x, mean - std, mean + std, color=color, alpha=0.2, linewidth=0)
        steps = [0, *(step for step, _ in layout.finished_records[0].loss_curve[:shortest])]
        evaluations = [
            (row["step"], row["loss"]) for r in layout.finished_records for row in r.evaluations
        ]
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


def _plot_speeds(layouts: Sequence[LayoutRow]) -> Figure | None:
    """Plot tokens/s as bars: means over the seeds, with standard deviations as error bars. Return
    None if no run was measured."""
    tokens_per_s = MEASURED["tokens/s"]
    measured_layouts = [
        layout for layout in layouts if tokens_per_s.values(layout.finished_records)
    ]
    if not measured_layouts:
        return None
    names = [textwrap.fill(layout.name, 24) for layout in measured_layouts]
    speeds = [tokens_per_s.values(layout.finished_records) for layout in measured_layouts]
    means = [statistics.fmean(values) for values in speeds]
    errors = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in speeds]
    tallest = max(name.count("\n") for name in names)
    figure, axes = _new_figure(1.2 + (0.34 + 0.1 * tallest) * len(names))
    positions = range(len(names))  # numbers, because bars with equal names would overlap
    bars = axes.barh(positions, means, xerr=errors if any(errors) else None, color="#0072b2",
                     ecolor="#888888", capsize=3)  # fmt: skip
    axes.bar_label(bars, [f"{mean:,.0f}" for mean in means], padding=3, fontsize=8)
    axes.set_yticks(positions, labels=names)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xticks([])  # the bars have labels instead
    figure.supxlabel("tokens per second, all processes (median step)", fontsize=10)
    return figure


def format_for_terminal(section: Section, shared: Mapping[str, str] | None = None) -> str:
    """Return a section as text for a terminal: the title, the first table and the notes. The title
    leaves out the settings in `shared`, which all sections have in common. On a narrow terminal,
    the least important columns are left out."""
    title = section.title
    if shared:
        own_settings = {name: text for name, text in section.settings.items() if name not in shared}
        title = ": ".join(filter(None, [section.heading, join_settings(own_settings)]))
    width = shutil.get_terminal_size((WIDTH, 0)).columns
    columns = section.tables[0].columns
    for droppable in ("", *DROPPABLE_COLUMNS):
        columns = {name: cells for name, cells in columns.items() if name != droppable}
        headings = [name.replace("peak ", "").replace(" ", "\n", 1) for name in columns]
        text = tabulate(
            # The headings are a row of the table, because tabulate adds padding to its own
            # headings.
            [headings, *zip(*columns.values(), strict=True)],
            tablefmt="plain", disable_numparse=True, colalign=_column_alignment(columns),
            maxcolwidths=[NAME_WIDTH, *[None] * (len(columns) - 1)],
        )  # fmt: skip
        if max(map(len, text.splitlines())) <= width:
            break
    notes = [fold(note, width) for note in section.notes]
    lines = "\n".join([fold(title, width), text, *notes]).split("\n")
    return "\n".join(map(printable, lines))


def _column_alignment(headers: Iterable[str]) -> list[str]:
    return ["left" if name in TEXT_COLUMNS else "right" for name in headers]


def save_plots(sections: Sequence[Section], folder: Path) -> list[str]:
    """Write the plots into `folder` and return the file names. Raises OSError if writing fails."""
    plots = {f"{name}.png": png for section in sections for name, png in section.plots.items()}
    for name, png in plots.items():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(png)
    return list(plots)


def shared_settings(sections: Sequence[Section]) -> dict[str, str]:
    """Return the settings that all sections share. Return {} if there are fewer than two
    sections."""
    if len(sections) < 2:
        return {}
    shared_items = set.intersection(*({*section.settings.items()} for section in sections))
    return dict(item for item in sections[0].settings.items() if item in shared_items)


def join_settings(settings: Mapping[str, str]) -> str:
    """Format settings on one line."""
    return ", ".join(f"{name} {text}" for name, text in settings.items())


def render_page(
    file_type: str, title: str, heading: str, sections: Sequence[Section], note: str = ""
) -> str:
    """Return a page that begins with the settings that all sections share. If `file_type` is "md",
    the plots are in separate files. If `file_type` is "html", the page is a single file without
    scripts or network access."""
    shared = shared_settings(sections)

    def own_settings(section: Section) -> dict[str, str]:
        return {name: text for name, text in section.settings.items() if name not in shared}

    return fill_template(
        f"page.{file_type}.jinja", title=title, heading=heading, sections=sections, note=note,
        shared=shared, own_settings=own_settings, tabulate=tabulate, align=_column_alignment,
        b64encode=base64.b64encode,
    )  # fmt: skip


def find_records(paths: Sequence[Path]) -> list[Record]:
    """Return the records in `paths`, without duplicates. Each path is a run, a folder of runs or a
    record file. Each record's `run_dir` is set to its actual location. Print a note about folders
    without records. Raises UserError for a file that is not a record."""
    records: dict[Path, Record] = {}
    for path in map(resolve_user_path, paths):
        files = [path]
        if not path.exists():
            fix = "name a run, a folder of runs, or a record"
            raise UserError(f"{path} does not exist", fix=fix)
        if path.is_dir():
            files = sorted([*path.glob(f"[!.]*/{RECORD_FILE}"), *path.glob("*.json")])
        records_here = {}
        for file in map(Path, map(os.path.realpath, files)):  # resolves the link runs/latest
            run_dir = file.parent if file.name == RECORD_FILE else file.with_suffix("")
            try:
                record = load_record(file)
            except UserError as error:
                if not path.is_dir():
                    raise
                if file.name == RECORD_FILE:  # a folder may contain other JSON files
                    print_stderr(f"note: {error}")
                continue
            records_here[file] = record.model_copy(update={"run_dir": str(run_dir)})
        if not records_here:
            print_stderr(f"note: {path} is skipped because it contains no record of a run.")
        records |= records_here
    return list(records.values())


def main(arguments: argparse.Namespace, output_dir: Path) -> int:
    """Show the runs that `arguments` name or, by default, all runs in `output_dir`. Write the plots
    or the HTML page. Return the exit code."""
    paths = arguments.paths or [output_dir]
    records = find_records([path for path in paths if arguments.paths or path.is_dir()])
    if not records:
        what = f"There is no run record in {', '.join(map(short_path, paths))}"
        raise UserError(what, fix=f"train first, or name another folder. Run: {COMMAND} FOLDER")
    target = arguments.html or arguments.plots
    fix = f"set {'--html' if arguments.html else '--plots'} to another path"
    folder = target.parent if arguments.html else target
    require_writable(folder, fix, *([target.name] if arguments.html else []))
    comparisons = group_by_work(records)[: None if arguments.all else MAX_TABLES]
    sections = build_sections(comparisons)
    runs_text = short_path(os.path.commonpath([r.run_dir for r in records]))
    if len(records) > 1:
        runs_text = f"{len(records)} runs in {runs_text}"
    num_hidden = len(records) - sum(len(comparison.records) for comparison in comparisons)
    note = ""
    if num_hidden:
        hidden_text = plural(num_hidden, "older run")
        note = f"Not shown: {hidden_text} with other settings. To show all runs, add --all."
    shared = shared_settings(sections)
    header = "\n".join(filter(None, [runs_text, fold(join_settings(shared))]))
    texts = [header, *(format_for_terminal(section, shared) for section in sections), note]
    print("\n\n".join(filter(None, texts)), flush=True)
    written_text = short_path(target)
    if arguments.html:
        folder.mkdir(parents=True, exist_ok=True)
        target.write_text(
            render_page("html", "Training runs", runs_text, sections, note), encoding="utf-8"
        )
    else:
        names = ", ".join(save_plots(sections, target))
        written_text = names and f"{written_text}/{names}"
    if written_text:
        print(textwrap.fill(f"Wrote {written_text}.", WIDTH, break_long_words=False))
    return 0
