"""Runs side by side, as a terminal shows them: one table for each kind of work, 80 columns wide."""

from __future__ import annotations

import platform
import shutil
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from distributed_training.records.display import NOT_MEASURED, WIDTH, last_part, short_path
from distributed_training.records.record import Record, is_alive
from distributed_training.records.tables import COLUMNS

MAX_TABLES = 3
# What is said above a table where all rows agree, else a column.
_SETTINGS: dict[str, Callable[[Record], str]] = {
    **{name: COLUMNS[name] for name in ("model", "processes", "batch", "precision", "compile")},
    "dataset": lambda r: last_part(r.config["dataset"]),
}
_IN_SETTINGS = {"model", "dataset", "max_length", "precision"}
_AS_PUBLISHED = ("tokens/s", "MFU", "peak GPU memory", "peak host memory", "bubble", "loss")
MEASURED: dict[str, Callable[[Record], str]] = {
    **{name: COLUMNS[name] for name in _AS_PUBLISHED},
    # That of the untrained model is none of a run that was not evaluated since.
    "perplexity": lambda r: COLUMNS["perplexity"](r) if _was_evaluated(r) else NOT_MEASURED,
}
# Given up in this order where a terminal is too narrow.
_LEAST = ("peak host memory", "MFU", "bubble", "loss", "batch", "dataset")


@dataclass(frozen=True)
class Work:
    """Records that did the same work, in the order of their start."""

    records: list[Record]
    names: list[str]  # of the runs, short; empty for the only run
    differs: str  # how this work differs from the others; empty where there is one

    @property
    def settings(self) -> dict[str, str]:
        """What all runs have in common."""
        found = {name: {cell(r) for r in self.records} for name, cell in _SETTINGS.items()}
        return {name: cells.pop() for name, cells in found.items() if len(cells) == 1}

    @property
    def title(self) -> str:
        """What all runs have in common and how other tables differ, in words."""
        common = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        return "; ".join(filter(None, (common, self.differs)))

    def columns(self) -> dict[str, list[str]]:
        """Heading -> cells, without what no run has measured or all runs have in common."""
        found = {"run": self.names} if any(self.names) else {}
        found["strategy"] = [COLUMNS["strategy"](r) for r in self.records]
        for name, cell in (_SETTINGS | MEASURED).items():
            cells = ["-" if (text := cell(r)) == NOT_MEASURED else text for r in self.records]
            if name not in self.settings and set(cells) != {"-"}:
                found[name] = cells
        return found | {"status": [status(r) for r in self.records]}

    def errors(self) -> list[str]:
        """Why runs ended early, one line each."""
        runs = zip(self.names, self.records, strict=True)
        return [f"{name} {r.status}: {r.error}".lstrip() for name, r in runs if r.error]


def group_by_work(records: Sequence[Record]) -> list[Work]:
    """Records by the work they did, that of the newest run first."""
    records = sorted(records, key=lambda r: r.started_at)
    short = run_names(records) if len(records) > 1 else [""]
    names = dict(zip(map(id, records), short, strict=True))
    keys = dict.fromkeys(key for record in records for key in record.work)
    telling = [key for key in keys if len({repr(r.work.get(key, ...)) for r in records}) > 1]
    groups: dict[str, list[Record]] = {}
    for record in reversed(records):
        work = repr([record.work.get(key, ...) for key in telling])
        groups.setdefault(work, []).insert(0, record)
    said = [key for key in telling if key not in _IN_SETTINGS]
    if len(telling) > 1:  # a hash tells a reader least
        said = [key for key in said if key != "data_fingerprint"]
    return [
        Work(
            group,
            [names[id(r)] for r in group],
            ", ".join(f"{key} {last_part(str(group[0].work.get(key)))[:12]}" for key in said),
        )
        for group in groups.values()
    ]


def run_names(records: Sequence[Record]) -> list[str]:
    """What tells the names of the runs' folders apart: the first words that do."""
    words = [tuple(Path(r.run_dir).name.split("-")) for r in records]
    different = set(words)
    if len(different) < 2:
        return ["-".join(name) for name in words]
    longest = range(max(map(len, words)) + 1)
    first = max(n for n in longest if len({name[:n] for name in different}) == 1)
    last = min(n for n in longest if len({name[:n] for name in different}) == len(different))
    return ["-".join(name[first:last]) for name in words]


def status(r: Record) -> str:
    """How a run ended and, unless it is finished, where."""
    if r.status == "ok":
        return "ok"
    killed = r.status == "running" and r.hostname == platform.node() and not is_alive(r)
    return f"{'killed' if killed else r.status} {r.step}/{r.num_steps}"


def _was_evaluated(r: Record) -> bool:
    return any(entry["step"] > 0 for entry in r.evaluations)


def comparison(works: Sequence[Work]) -> str:
    """One table a work, as wide as the terminal."""
    width = shutil.get_terminal_size((WIDTH, 0)).columns
    parts = []
    for work in works:
        title = textwrap.fill(work.title, width)
        errors = [textwrap.shorten(line, width, placeholder=" ...") for line in work.errors()]
        parts.append("\n".join([title, _table(work.columns(), width), *errors]))
    return "\n\n".join(parts)


def _table(columns: dict[str, list[str]], width: int) -> str:
    """Plain text, without the least columns where it would be wider than `width`."""
    for least in (None, *_LEAST):
        columns.pop(least or "", None)
        headings = [name.replace("peak ", "").replace(" ", "\n", 1) for name in columns]
        align = ["right" if name in MEASURED else "left" for name in columns]
        rows = [headings, *zip(*columns.values(), strict=True)]  # as headings they get padding
        text = tabulate(rows, tablefmt="plain", disable_numparse=True, colalign=align)
        if max(map(len, text.splitlines())) <= width:
            break
    return text


def describe_runs(records: Sequence[Record]) -> str:
    """Which folders the short names stand for."""
    folders = [Path(r.run_dir) for r in records]
    if len({folder.parent for folder in folders}) > 1:
        return f"{len(records)} runs"
    if len(records) == 1:
        return short_path(folders[0])
    name = run_names(records)[0]
    before, _, _ = folders[0].name.partition(name)
    return f"{len(records)} runs: {short_path(folders[0].parent)}/{before}<run>..."
