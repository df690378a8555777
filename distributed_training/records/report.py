"""Run records -> comparison tables and plots, and documents that cannot drift from them.

    python real_model_example.py report runs/*                     table, plots in report/
    python real_model_example.py report --write TRAINING_RESULTS.md README.md
    python real_model_example.py report --check TRAINING_RESULTS.md README.md

Documents hold cog blocks that call `published_table` and `published_json`; --write is `cog -r`.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from cogapp import Cog
from cogapp.cogapp import CogCheckFailed, CogError
from matplotlib.figure import Figure
from tabulate import tabulate

from distributed_training.records.display import GIB
from distributed_training.records.record import RECORD_FILE, Record, load_record
from distributed_training.records.tables import COLUMNS, DEFAULT, MARKDOWN, comparison, table
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import ROOT, did_you_mean, load_json
from distributed_training.settings.strategies import list_strategies

RECORDS_DIR = ROOT / "results" / "records"
COMMAND = "python real_model_example.py report"
STYLES = ("-", "--", "-.", ":")
# Columns that tell two records of one strategy apart.
DISTINCTIONS = ("model", "batch", "precision", "compile", "processes")


def published_table(
    name: str,
    columns: str = ", ".join(DEFAULT),
    where: Mapping[str, Any] | None = None,
    without: Mapping[str, Any] | None = None,
) -> str:
    """A document's table of results/records/<name>/*.json whose CONFIG has all of `where` and none
    of `without`, by model and strategy. Raises UserError for a word that selects nothing.
    """
    order, words = list(list_strategies()), columns.split(", ")
    records = [load_record(path) for path in sorted((RECORDS_DIR / name).glob("*.json"))]
    if not records:
        raise UserError(f"{RECORDS_DIR / name} holds no records", fix=f"see {RECORDS_DIR}")
    records.sort(key=lambda r: (r.config["precision"], r.started_at))
    records.sort(key=lambda r: (r.num_parameters, order.index(r.strategy["name"])))
    _check_words(name, "column", words, COLUMNS)
    for conditions, wanted in ((where or {}, True), (without or {}, False)):
        _check_words(name, "key", conditions, records[0].config)
        for key, value in conditions.items():
            kept = [r for r in records if (r.config.get(key) == value) is wanted]
            if not kept or (not wanted and len(kept) == len(records)):
                raise UserError(f"{name}: {key}={value!r} selects nothing", fix="correct the value")
            records = kept
    return f"\n{table(records, words)}\n"  # Markdown needs the blank lines


def published_json(file: str, key: str, columns: str) -> str:
    """A document's table of one entry of any published JSON: a row per key, a column per key of its
    value. Raises UserError for words that the file does not have."""
    entries = load_json(RECORDS_DIR / file, "record")
    words, rows = columns.split(", "), []
    _check_words(file, "key", [key], [k for k, entry in entries.items() if isinstance(entry, dict)])
    for row, value in entries[key].items():
        values = value if isinstance(value, dict) else dict.fromkeys(words[:1], value)
        _check_words(f"{file}, {row}", "column", words, values)
        rows.append([row, *(_figure(values[word]) for word in words)])
    return f"\n{tabulate(rows, ['', *words], **MARKDOWN)}\n"


def _figure(value: float) -> str:
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3f}" if abs(value) >= 1 else f"{value:.1e}"


def _check_words(where: str, what: str, words: Iterable[str], known: Collection[str]) -> None:
    for word in set(words).difference(known):
        what, why = f"{where}: the {what} {word!r} is not known", f"known are {', '.join(known)}"
        raise UserError(what, why, did_you_mean(word, known))


def run_cog(option: str, documents: Sequence[Path]) -> None:
    """`cog -r` (write) or `cog --check`. Raises UserError for a document that differs from its
    records or cannot be read, or a block that cannot be filled."""
    names = " ".join(map(str, documents))
    try:
        Cog().callable_main(["cog", option, "--verbosity=1", *map(str, documents)])
    except CogCheckFailed:
        what, fix = "documents differ from results/records", f"type: {COMMAND} --write {names}"
        raise UserError(what, fix=fix) from None
    except CogError as error:
        cause = error.__context__
        text = str(cause if isinstance(cause, UserError) else error).splitlines()[-1]
        raise UserError(f"a block of {names} fails", text) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{names} cannot be read or written", str(error)) from None


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
    counts = Counter(found)
    for place, record in enumerate(records):
        if counts[found[place]] > 1:
            found[place] += f", {Path(record.run_dir).name or f'run {place + 1}'}"
    return found


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


def main(argv: Sequence[str]) -> int:
    """Command line; returns the exit code, raises UserError."""
    parser = argparse.ArgumentParser(
        prog=COMMAND, description="Tables and plots from run records.", allow_abbrev=False
    )
    add = parser.add_argument
    add("paths", nargs="*", type=Path, help="run folders, records or documents")
    add("--write", action="store_true", help="fill generated parts of documents")
    add("--check", action="store_true", help="fail when documents are out of date")
    add("--plots", type=Path, default=Path("report"), help="folder for the plots")
    arguments = parser.parse_args(argv)
    if (arguments.write or arguments.check) and arguments.paths:
        run_cog("-r" if arguments.write else "--check", arguments.paths)
        return 0
    records = []
    for path in arguments.paths:
        if path.is_dir() and not (path / RECORD_FILE).is_file():  # it failed before its first step
            print(f"note: {path} holds no {RECORD_FILE}; left out", file=sys.stderr)
        else:
            records.append(load_record(path))
    if not records:
        raise UserError("no run record in these paths", fix=f"try: {COMMAND} runs/*")
    print(comparison(records))
    try:
        for path in draw_plots(records, arguments.plots):
            print(f"wrote {path}")
    except OSError as error:
        what = f"plots cannot be written to {arguments.plots}"
        raise UserError(what, str(error), "give another folder to --plots") from None
    return 0
