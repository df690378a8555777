"""Run records -> comparison tables and plots, and documents that cannot drift from them.

    python real_model_example.py report runs/*                     table, plots in report/
    python real_model_example.py report --write TRAINING_RESULTS.md README.md
    python real_model_example.py report --check TRAINING_RESULTS.md README.md

Documents hold cog blocks that call `published_table` and `published_json`: --write is `cog -r`, and
--check is `cog --check`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cogapp import Cog
from cogapp.cogapp import CogCheckFailed, CogError
from tabulate import tabulate

from distributed_training.records.plots import draw_plots
from distributed_training.records.record import RECORD_FILE, load_record
from distributed_training.records.schema import Record
from distributed_training.records.tables import COLUMNS, DEFAULT, MARKDOWN, comparison, table
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import ROOT, did_you_mean, load_json
from distributed_training.settings.strategies import list_strategies

RECORDS_DIR = ROOT / "results" / "records"
COMMAND = "python real_model_example.py report"


def load_records(paths: Sequence[Path]) -> list[Record]:
    """Records of run folders or files. A folder without one, as of a run that failed before its
    first step, is named on stderr and left out."""
    found = []
    once = {path.resolve(): path for path in reversed(paths)}  # latest is in runs/*, too
    for path in reversed(once.values()):
        if path.is_dir() and not (path / RECORD_FILE).is_file():
            print(f"note: {path} holds no {RECORD_FILE}; left out", file=sys.stderr)
        else:
            found.append(load_record(path))
    return found


def published(name: str) -> list[Record]:
    """The records results/records/<name>/*.json, by model and strategy."""
    folder, order = RECORDS_DIR / name, list(list_strategies())
    records = load_records(sorted(folder.glob("*.json")))
    if not records:
        raise UserError(f"{folder} holds no records", fix=f"see {RECORDS_DIR}")

    def place(r: Record) -> tuple[int, int, str, str]:
        strategy = order.index(r.strategy.name)
        return r.num_parameters, strategy, r.config["precision"], r.started_at

    return sorted(records, key=place)


def published_table(
    name: str,
    columns: str = ", ".join(DEFAULT),
    where: Mapping[str, Any] | None = None,
    without: Mapping[str, Any] | None = None,
) -> str:
    """A document's table of `published(name)`: records whose CONFIG has all of `where` and none of
    `without`. Raises UserError for a word that selects nothing.
    """
    records, words = published(name), columns.split(", ")
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
        why = f"known are {', '.join(known)}"
        fix = did_you_mean(word, known)
        raise UserError(f"{where}: the {what} {word!r} is not known", why, fix)


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


def print_report(paths: Sequence[Path], folder: Path) -> None:
    """Print the comparison of runs and draw their plots into a folder."""
    records = load_records(paths)
    if not records:
        raise UserError("no run record in these paths", fix=f"try: {COMMAND} runs/*")
    print(comparison(records))
    try:
        for path in draw_plots(records, folder):
            print(f"wrote {path}")
    except OSError as error:
        what = f"plots cannot be written to {folder}"
        raise UserError(what, str(error), "give another folder to --plots") from None


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
    else:
        print_report(arguments.paths, arguments.plots)
    return 0
