"""Generate the tables in the documents from published records. Each table begins and ends with a
blank line, which Markdown needs."""

import re
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from distributed_training.records.record import load_record
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import ROOT, load_json
from distributed_training.settings.strategies import list_strategies
from results.lab.pages.columns import COLUMNS, DEFAULT, MARKDOWN, table

RECORDS_DIR = ROOT / "results" / "records"
HEADINGS = {
    "GiB": "allocated GiB",
    "KiB a step": "KiB per step",
    "bits_per_byte": "bits per byte of general text",
    "facts": "facts (of 60 questions)",
    "first_line": "first line",
    "first_step": "first step",
    "general": "general (of 89 questions)",
    "last_step": "last step",
    "predicted step_time_s": "predicted step time, s",
    "real_share": "share of real tokens",
    "real_tokens_per_s": "real tokens/s",
    "step_time_s": "step time, s",
    "words": "words per answer (median)",
}  # keys of published JSON files whose column headings differ from the key


def markdown_table(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    return f"\n{tabulate(rows, headers, **MARKDOWN)}\n"


def published_table(
    name: str,
    columns: str = ", ".join(DEFAULT),
    where: Mapping[str, Any] | None = None,
    without: Mapping[str, Any] | None = None,
) -> str:
    """Return a table of the records in results/records/<name>/*.json, sorted by model and strategy.
    The table contains only records whose CONFIG has all values in `where` and none in `without`.
    Raises UserError if there are no records, if a column or key is unknown, or if a condition
    selects nothing."""
    order = list(list_strategies())
    column_names = columns.split(", ")
    records = [load_record(path) for path in sorted((RECORDS_DIR / name).glob("*.json"))]
    if not records:
        raise UserError(f"{RECORDS_DIR / name} has no records", fix=f"see {RECORDS_DIR}")
    records.sort(key=lambda r: (r.config["precision"], r.started_at))
    records.sort(key=lambda r: (r.num_parameters, order.index(r.strategy["name"])))
    _check_names(name, "column", column_names, COLUMNS)
    for conditions, must_match in ((where or {}, True), (without or {}, False)):
        _check_names(name, "key", conditions, records[0].config)
        for key, value in conditions.items():
            selected = [r for r in records if (r.config.get(key) == value) is must_match]
            if not selected or (not must_match and len(selected) == len(records)):
                raise UserError(f"{name}: {key}={value!r} selects nothing", fix="correct the value")
            records = selected
    versions = [(r.model_extra or {})["versions"] for r in records]
    return f"\n{table(records, column_names)}\n{_name_torch(versions)}"


def published_json(*files: str, key: str, columns: str, rows: str = "") -> str:
    """Return a table of the entry named `key` in each published JSON file. The table contains one
    row per item of this entry whose name contains the pattern `rows`, and one column per name in
    `columns`. Raises UserError if a file lacks the entry or a column."""
    column_names = columns.split(", ")
    cells = []
    versions = []
    for file in files:
        entries = load_json(RECORDS_DIR / file, "record")
        versions.append(entries["versions"])
        known = [name for name, entry in entries.items() if isinstance(entry, dict)]
        _check_names(file, "key", [key], known)
        for row, value in entries[key].items():
            if not re.search(rows, row):
                continue
            values = value if isinstance(value, dict) else dict.fromkeys(column_names[:1], value)
            _check_names(f"{file}, {row}", "column", column_names, values)
            cells.append([row, *(_format_number(values[name]) for name in column_names)])
    headers = ["", *(HEADINGS.get(name, name) for name in column_names)]
    return markdown_table(cells, headers) + _name_torch(versions)


def answers(questions: Sequence[str]) -> str:
    """Return a table of answers before and after a training with the preset laptop."""
    runs = load_json(RECORDS_DIR / "quality" / "laptop.json", "record")["runs"]
    columns = {"before": "before", "seed 0": "after"}
    rows = [
        [question, *(runs[run]["answers"][question] for run in columns)] for question in questions
    ]
    return markdown_table(rows, ["", *columns.values()])


def _name_torch(versions: Iterable[Mapping[str, str]]) -> str:
    """Return the line below a table that names the versions of torch."""
    releases = sorted({version["torch"].partition("+")[0] for version in versions})
    return f"\n*torch {', '.join(releases)}*\n"


def unsloth_calls(pattern: str) -> list[dict[str, float]]:
    """Return the recorded comparisons with Unsloth whose file and row contain the pattern."""
    calls = {}
    for file in ("h100-unsloth/rows", "h200-unsloth/rows", "h200-2026/rows", "h200-2026/mixtures"):
        for row, values in load_json(RECORDS_DIR / f"{file}.json", "record")["rows"].items():
            if values["ours / Unsloth"]:
                calls[f"{file}: {row}"] = values
    for path in sorted((RECORDS_DIR / "h200-torch-2.14").glob("unsloth-*.json")):
        for number, turn in enumerate(load_json(path, "record")["turns"]):
            peaks = {"GiB": turn["ours"]["GiB"], "Unsloth GiB": turn["Unsloth"]["GiB"]}
            calls[f"{path.stem} {number}"] = {**peaks, "ours / Unsloth": turn["ratio"]}
    return [call for name, call in calls.items() if re.search(pattern, name)]


def against_unsloth(patterns: Mapping[str, str]) -> str:
    """Return a table that summarizes the `unsloth_calls` of each pattern below its label."""
    table_rows = []
    for label, pattern in patterns.items():
        calls = unsloth_calls(pattern)
        ratios = [call["ours / Unsloth"] for call in calls]
        speeds = (statistics.median(ratios), min(ratios), max(ratios))
        peaks = [
            statistics.median(call[peak] for call in calls if call[peak])
            for peak in ("GiB", "Unsloth GiB")
        ]
        cells = [f"{ratio:.2f}" for ratio in speeds] + [f"{peak:.1f}" for peak in peaks]
        table_rows.append([label, str(len(calls)), *cells])
    headers = ["", "comparisons", "speed (median)", "lowest", "highest", "GiB", "Unsloth's GiB"]
    return markdown_table(table_rows, headers)


def _format_number(value: float | None) -> str:
    if value is None:
        return ""
    if isinstance(value, int) or value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3f}" if abs(value) >= 0.01 else f"{value:.1e}"


def _check_names(where: str, what: str, names: Iterable[str], known: Collection[str]) -> None:
    for name in set(names).difference(known):
        what = f"{where}: the {what} {name!r} is not known"
        why = f"the known names are {', '.join(known)}"
        raise UserError(what, why)
