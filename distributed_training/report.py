"""Run records -> comparison tables and plots, and documents that cannot drift from them.

    python -m distributed_training.report runs/*                    table, plots in report/
    python -m distributed_training.report --write TRAINING_RESULTS.md README.md
    python -m distributed_training.report --check TRAINING_RESULTS.md README.md

A document holds generated parts between two comment lines:

    <!-- table: h200-x1 -->
    ...
    <!-- end -->

(or `json: FILE key="..." columns="..."` for one entry of another published JSON file).

`--write` fills them from results/records/ and `--check` fails when a part differs from what
`--write` would put there.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from distributed_training.errors import UserError
from distributed_training.files import load_json, nearest
from distributed_training.plots import draw_plots
from distributed_training.record import RECORD_FILE, load_record
from distributed_training.strategy import ROOT, list_strategies
from distributed_training.tables import COLUMNS, DEFAULT_COLUMNS, Record, comparison, table

RECORDS_DIR = ROOT / "results" / "records"


def load_records(paths: Sequence[Path]) -> list[Record]:
    """Records of run folders or files. Folders without one (a run that failed before its first
    step, another folder under runs/) are named on stderr and left out.
    """
    found = []
    for path in paths:
        if path.is_dir() and not (path / RECORD_FILE).is_file():
            print(f"note: {path} holds no {RECORD_FILE}; left out", file=sys.stderr)
        else:
            found.append(load_record(path))
    return found


def published(name: str) -> list[Record]:
    """The records of one published measurement, results/records/<name>/*.json, by model
    and strategy."""
    folder = RECORDS_DIR / name
    order = list(list_strategies())
    records = load_records(sorted(folder.glob("*.json")))
    if not records:
        raise UserError(f"{folder} holds no records", fix=f"see {RECORDS_DIR}")
    return sorted(
        records,
        key=lambda r: (
            r["num_parameters"],
            order.index(r["strategy"]["name"]) if r["strategy"]["name"] in order else len(order),
            r["config"]["precision"],
            r["started_at"],
        ),
    )


_PART = re.compile(
    r"(?P<begin><!-- (?P<kind>table|json): (?P<name>[\w./-]+)(?P<options>[^>]*)-->)\n"
    r"(?:(?!<!--).)*?<!-- end -->",
    re.DOTALL,
)
_BEGIN = re.compile(r"<!-- (?:table|json):.*")
_OPTION = re.compile(r'(\w+)="([^"]*)"')


def render(text: str) -> str:
    """`text` with every generated part filled from the published records.

    Options of a table: columns="strategy, tokens/s" and where="model=gpt2-medium, strategy!=pp".
    Raises UserError for a part without an end, and for options that say nothing about the records.
    """
    for line in _BEGIN.findall(_PART.sub("", text)):
        raise UserError(
            f"{line!r} does not begin a generated part",
            'that is <!-- table: NAME columns="..." where="..." --> with a line <!-- end --> below',
            "mend it",
        )
    return _PART.sub(_fill, text)


def _fill(match: re.Match[str]) -> str:
    where, options = f"{match['kind']} {match['name']}", dict(_OPTION.findall(match["options"]))
    if _OPTION.sub("", match["options"]).strip():
        raise UserError(
            f"{where}: {match['options'].strip()!r} is not understood",
            fix='write options as name="value"',
        )
    make = _table_of_records if match["kind"] == "table" else _table_of_json
    return f"{match['begin']}\n\n{make(where, match['name'], options)}\n\n<!-- end -->"


def _table_of_records(where: str, name: str, options: dict[str, str]) -> str:
    _check_words(where, "option", options, ("columns", "where"))
    records = published(name)
    keys = list(records[0]["config"])
    for condition in _split(options.get("where", "")):
        key, _, value = (part.strip() for part in condition.partition("="))
        wanted = not key.endswith("!")
        key = key.removesuffix("!").strip()
        _check_words(where, "key of where", [key], keys)
        kept = [r for r in records if (str(r["config"].get(key)) == value) is wanted]
        if not wanted and len(kept) == len(records):
            raise UserError(f"{where}: {condition!r} leaves nothing out", fix="mend its value")
        records = kept
    if not records:
        raise UserError(f"no record of {name} matches {options['where']!r}")
    columns = _split(options.get("columns", "")) or DEFAULT_COLUMNS
    _check_words(where, "column", columns, COLUMNS)
    return table(records, columns)


def _table_of_json(where: str, name: str, options: dict[str, str]) -> str:
    """One entry of any published JSON: a row a key, a column a value's key."""
    _check_words(where, "option", options, ("columns", "key"))
    key, columns = options.get("key", ""), _split(options.get("columns", ""))
    if not key or not columns:
        raise UserError(f"{where} needs two options", fix='write key="..." columns="..."')
    entries = load_json(RECORDS_DIR / name, "record")
    entries = {name: entry for name, entry in entries.items() if isinstance(entry, dict)}
    _check_words(where, "key", [key], entries)
    lines = ["| | " + " | ".join(columns) + " |", "| --- " * (len(columns) + 1) + "|"]
    for row, value in entries[key].items():
        values = value if isinstance(value, dict) else dict.fromkeys(columns[:1], value)
        _check_words(f"{where}, {row}", "column", columns, values)
        lines.append(f"| {row} | " + " | ".join(_figure(values[name]) for name in columns) + " |")
    return "\n".join(lines)


def _figure(value: float) -> str:
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3f}" if abs(value) >= 1 else f"{value:.1e}"


def _split(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _check_words(where: str, what: str, words: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    for word in words:
        if word not in known:
            hint = nearest(word, known)
            raise UserError(
                f"{where}: the {what} {word!r} is not known",
                f"known are {', '.join(known)}",
                f"did you mean {hint!r}?" if hint else "",
            )


def _read(document: Path) -> str:
    try:
        return document.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"document {document} cannot be read", str(error)) from None


def check_documents(paths: Sequence[Path]) -> list[str]:
    """Names of documents whose generated parts differ from their records."""
    return [str(path) for path in paths if render(_read(path)) != _read(path)]


def write_documents(paths: Sequence[Path]) -> None:
    """Fill the generated parts of documents; none is written unless all can be filled."""
    for path, text in [(path, render(_read(path))) for path in paths]:
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"document {path} cannot be written", str(error)) from None


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description="Tables and plots from run records.", allow_abbrev=False
    )
    parser.add_argument("paths", nargs="*", type=Path, help="run folders, records or documents")
    parser.add_argument("--write", action="store_true", help="fill generated parts of documents")
    parser.add_argument("--check", action="store_true", help="fail when documents are out of date")
    parser.add_argument("--plots", type=Path, default=Path("report"), help="folder for the plots")
    arguments = parser.parse_args(argv)
    try:
        if not arguments.paths:
            raise UserError(
                "no paths given", fix="try: python -m distributed_training.report runs/*"
            )
        if arguments.check:
            return _check(arguments.paths)
        if arguments.write:
            write_documents(arguments.paths)
        else:
            _report(arguments.paths, arguments.plots)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _report(paths: Sequence[Path], plots: Path) -> None:
    records = load_records(paths)
    if not records:
        raise UserError("no run record in these paths", fix="give folders under runs/")
    print(comparison(records))
    try:
        written = draw_plots(records, plots)
    except OSError as error:
        raise UserError(
            f"plots cannot be written to {plots}", str(error), "give another folder to --plots"
        ) from None
    for path in written:
        print(f"wrote {path}")


def _check(paths: Sequence[Path]) -> int:
    stale = check_documents(paths)
    for path in stale:
        print(
            f"error: {path} differs from results/records; "
            f"run: python -m distributed_training.report --write {path}",
            file=sys.stderr,
        )
    return int(bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
