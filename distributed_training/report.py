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
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from distributed_training.display import gib
from distributed_training.errors import UserError
from distributed_training.files import load_json, nearest
from distributed_training.plots import draw_plots
from distributed_training.record import RECORD_FILE, load_record
from distributed_training.strategy import ROOT, list_strategies

RECORDS_DIR = ROOT / "results" / "records"
Record = dict[str, Any]

# Column -> text from a record. Everything shown anywhere comes through here. GPU memory is what
# PyTorch's allocator reserved: "allocated" leaves out the buffers of CUDA graphs.
COLUMNS: dict[str, Callable[[Record], str]] = {
    "strategy": lambda r: " ".join([r["strategy"]["name"], *layout_words(r)]),
    "processes": lambda r: str(r["world_size"]),
    "batch": lambda r: f"{r['batch']['micro_batch_size']} x {r['config']['max_length']}",
    "precision": lambda r: r["config"]["precision"],
    "compile": lambda r: "yes" if r["config"]["compile"] else "no",
    "tokens/s": lambda r: _number(r["performance"].get("tokens_per_s"), "{:,.0f}"),
    "ms a step": lambda r: _number(
        r["performance"].get("step_time_s", {}).get("p50"), "{:,.1f}", scale=1000
    ),
    "timed steps": lambda r: str(r["performance"].get("num_timed_steps", 0)),
    "MFU": lambda r: _number(r["performance"].get("mfu"), "{:.1f}%", scale=100),
    "peak GPU memory": lambda r: gib(r["memory"]["peak_reserved_bytes"]),
    "peak host memory": lambda r: gib(r["memory"]["peak_host_bytes"]),
    "disk a step": lambda r: _disk(r),
    "loss": lambda r: _last([loss for _, loss in r["loss_curve"]], "{:.3f}"),
    "perplexity": lambda r: _last([entry["perplexity"] for entry in r["evaluations"]], "{:.1f}"),
    "steps": lambda r: f"{r['step']} of {r['num_steps']}",
    "status": lambda r: r["status"],
}
DEFAULT_COLUMNS = (
    "strategy", "processes", "batch", "tokens/s", "ms a step", "MFU", "peak GPU memory",
    "peak host memory", "loss", "perplexity", "status",
)  # fmt: skip


def layout_words(record: Record) -> list[str]:
    """What tells two runs of one strategy apart: axes and, with a pipeline, schedule and
    micro-batches. Nothing where the strategy's name says it all."""
    axes = record.get("topology", {})
    both = axes.get("dp_replicate", 1) > 1 and axes.get("dp_shard", 1) > 1
    if not both and axes.get("tp", 1) == axes.get("pp", 1) == 1:
        return []
    words = [f"{axis}{size}" for axis, size in axes.items() if size > 1]
    pipeline = record.get("pipeline")
    return words + ([f"{pipeline['schedule']}-m{pipeline['num_microbatches']}"] if pipeline else [])


def _number(value: float | None, form: str, scale: float = 1.0) -> str:
    return "not measured" if value is None else form.format(scale * value)


def _last(values: Sequence[float | None], form: str) -> str:
    """The last of what was measured at several steps; null there is what was not finite."""
    if not values:
        return "not measured"
    return "nan" if values[-1] is None else form.format(values[-1])


def _disk(record: Record) -> str:
    """Bytes a step of the whole training phase; below 10 MB a step it is only logging."""
    disk = record.get("disk")
    if disk is None:
        return "not measured"
    if max(disk["read_bytes"], disk["write_bytes"]) / disk["num_steps"] < 1e7:
        return "none"
    read, written = (disk[key] / disk["num_steps"] / 1e9 for key in ("read_bytes", "write_bytes"))
    return f"{read:.1f} GB read, {written:.1f} GB written"


def table(records: Sequence[Record], columns: Sequence[str] = DEFAULT_COLUMNS) -> str:
    """A Markdown table, one row a record. A run that did not finish shows its status instead of
    figures it does not have.
    """
    rows = [[_cell(record, column) for column in columns] for record in records]
    widths = [max(len(text) for text in cells) for cells in zip(columns, *rows, strict=True)]
    lines = [
        "| "
        + " | ".join(text.ljust(width) for text, width in zip(cells, widths, strict=True))
        + " |"
        for cells in [list(columns), ["-" * width for width in widths], *rows]
    ]
    return "\n".join(lines)


def _cell(record: Record, column: str) -> str:
    if "performance" not in record and column not in (
        "strategy", "processes", "batch", "precision", "compile", "status", "steps",
    ):  # fmt: skip
        return "-"
    return COLUMNS[column](record)


def group_by_work(records: Sequence[Record]) -> list[list[Record]]:
    """Records that did the same work together, groups in order of first appearance."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(json.dumps(record["work"], sort_keys=True), []).append(record)
    return list(groups.values())


def differing_keys(groups: Sequence[Sequence[Record]]) -> list[str]:
    """The keys of the work in which groups differ, or that not all of them have."""
    works = [group[0]["work"] for group in groups]
    return [
        key
        for key in dict.fromkeys(key for work in works for key in work)
        if len({json.dumps(work[key], sort_keys=True) if key in work else "" for work in works}) > 1
    ]


def comparison(records: Sequence[Record]) -> str:
    """One table for each kind of work; where there are several, each says how it differs."""
    groups = group_by_work(records)
    if len(groups) == 1:
        return table(records)
    keys = differing_keys(groups)
    parts = [
        f"These runs did {len(groups)} kinds of work; only rows of one table can be compared. "
        f"They differ in: {', '.join(keys)}."
    ]
    for group in groups:
        work = group[0]["work"]
        parts.append(", ".join(f"{key}={work.get(key)}" for key in keys))
        parts.append(table(group))
    return "\n\n".join(parts)


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
    """The records of one published measurement, results/records/<name>/*.json, by strategy."""
    folder = RECORDS_DIR / name
    order = list(list_strategies())
    records = load_records(sorted(folder.glob("*.json")))
    if not records:
        raise UserError(f"{folder} holds no records", fix=f"see {RECORDS_DIR}")
    return sorted(
        records,
        key=lambda r: (
            r["num_parameters"],
            r["batch"]["micro_batch_size"],
            order.index(r["strategy"]["name"]) if r["strategy"]["name"] in order else len(order),
            r["config"]["precision"],
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

    Options of a table: columns="strategy, tokens/s" and where="model=gpt2-medium, batch_size=4".
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
        _check_words(where, "key of where", [key], keys)
        records = [record for record in records if str(record["config"].get(key)) == value]
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
    return f"{value:,.0f}" if value == 0 or abs(value) >= 100 else f"{value:.1e}"


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
