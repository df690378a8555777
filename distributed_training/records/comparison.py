"""Runs that did the same work, side by side: by layout, in tables."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from distributed_training.records.display import NOT_MEASURED, gib, last_part
from distributed_training.records.record import Record, is_alive
from distributed_training.records.tables import (
    COLUMNS,
    MS_A_STEP,
    MS_PREDICTED,
    SETTINGS,
    Number,
    measured_peak,
    predicted_peak,
)

NOTHING = "-"
MEASURED = (
    "tokens/s", "ms a step", "MFU", "peak GPU memory", "peak host memory", "training loss",
    "validation loss", "validation perplexity",
)  # fmt: skip
PREDICTED = {  # what -> heading, measured, predicted
    "time": ("ms", MS_A_STEP, MS_PREDICTED),
    "memory": ("peak", Number(measured_peak, gib), Number(predicted_peak, gib)),
}
_IN_SETTINGS = {"model", "dataset", "max_length", "precision"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One row: a way to do the work and its runs, a seed each, or a run by itself."""

    name: str
    records: list[Record]
    num_runs: int = 1  # that are wanted
    why: str = ""  # there are fewer


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of words and numbers as text; the first column names the row."""

    title: str
    about: str
    headers: list[str]
    rows: list[list[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Layouts that did the same work."""

    layouts: list[Layout]
    work: str = ""  # what was asked for, or how it differs from others' work, in words
    rows: str = "strategy"  # what a row is

    @property
    def records(self) -> list[Record]:
        return [record for layout in self.layouts for record in layout.records]

    @property
    def finished(self) -> list[Layout]:
        """Layouts with results, and of their runs those that have them."""
        found = []
        for layout in self.layouts:
            if records := [r for r in layout.records if r.performance]:
                found.append(Layout(name=layout.name, records=records))
        return found

    @property
    def title(self) -> str:
        """What all runs have in common."""
        if not self.records:
            return self.work
        device = self.records[0].machine["gpu_name"] or "CPU"
        common = [f"{name} {value}" for name, value in common_settings(self.records).items()]
        return "; ".join(filter(None, (", ".join([*common, f"on {device}"]), self.work)))

    @property
    def notes(self) -> list[str]:
        """What a reader must know besides: why runs failed, and whether they can be compared."""
        found = [f"{layout.name} failed: {layout.why}" for layout in self.layouts if layout.why]
        for layout in self.layouts:
            found += [f"{layout.name} {r.status}: {r.error}" for r in layout.records if r.error]
            found += [f"{layout.name} {note}" for r in layout.records if (note := overfitting(r))]
        works = [record.work for record in self.records]
        if differ := [key for key in differing(works) if key != "seed"]:
            found.append(f"The runs did not do the same work: they differ in {', '.join(differ)}.")
        return found

    def tables(self) -> list[Table]:
        """Those that there are figures for."""
        fullest = "Of the fullest process at its fullest moment, as predicted."
        sends = (
            "Of the process that sends most, by formula (strategies/LAWS.md), collectives as rings."
        )
        done = {layout.name: layout.records[0] for layout in self.finished}
        memory = {name: _memory_parts(r) for name, r in done.items()}
        sent = {name: (r.prediction or {}).get("sent_bytes", {}) for name, r in done.items()}
        found = [
            results(self),
            predictions(self),
            _parts_table("Memory by component", fullest, self.rows, memory),
            _parts_table("Bytes sent a step", sends, self.rows, sent, "over "),
        ]
        return [table for table in found if len(table.headers) > 1]


def differing(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values are not equal in all."""
    keys = dict.fromkeys(key for run in runs for key in run)
    return [key for key in keys if len({repr(run.get(key)) for run in runs}) > 1]


def common_settings(records: Sequence[Record]) -> dict[str, str]:
    differ = differing([{name: cell(r) for name, cell in SETTINGS.items()} for r in records])
    return {name: cell(records[0]) for name, cell in SETTINGS.items() if name not in differ}


def overfitting(r: Record) -> str:
    """Where the validation loss was lowest, if it has risen since."""
    seen = [(row["loss"], row["step"]) for row in r.evaluations if row["loss"] is not None]
    lowest, step = min(seen, default=(0, 0))
    last = seen[-1][0] if seen else 0
    if last <= 1.01 * lowest:
        return ""
    return f"overfitted: its validation loss was {lowest:.3f} after step {step}, now {last:.3f}"


def status(r: Record) -> str:
    """How a run ended and, unless it is finished, where."""
    if r.status == "ok":
        return "ok"
    killed = r.status == "running" and r.hostname == platform.node() and not is_alive(r)
    return f"{'killed' if killed else r.status} {r.step}/{r.num_steps}"


def group_by_work(records: Sequence[Record]) -> list[Comparison]:
    """A row a run, by the work they did, that of the newest run first."""
    records = sorted(records, key=lambda r: r.started_at)
    telling = differing([record.work for record in records])
    groups: dict[str, list[tuple[str, Record]]] = {}
    for name, r in reversed([*zip(run_names(records), records, strict=True)]):
        work = repr([r.work.get(key) for key in telling])
        groups.setdefault(work, []).insert(0, (name, r))
    said = [key for key in telling if key not in _IN_SETTINGS]
    if len(telling) > 1:  # a hash tells a reader least
        said = [key for key in said if key != "data_fingerprint"]
    found = []
    for group in groups.values():
        common = common_settings([r for _, r in group])
        layouts = []
        for name, r in group:
            own = [f"{key} {cell(r)}" for key, cell in SETTINGS.items() if key not in common]
            words = f"{name} {COLUMNS['strategy'](r)}".lstrip()
            layouts.append(Layout(name=", ".join([words, *own]), records=[r]))
        first = group[0][1].work
        differs = ", ".join(f"{key} {last_part(str(first.get(key)))[:12]}" for key in said)
        found.append(Comparison(layouts=layouts, work=differs, rows="run"))
    return found


def run_names(records: Sequence[Record]) -> list[str]:
    """What tells the names of the runs' folders apart: the first words that do. Empty for the only
    run."""
    words = [Path(r.run_dir).name.split("-") for r in records]
    different = set(map(tuple, words))
    if len(different) == 1:
        return ["" if len(records) == 1 else "-".join(name) for name in words]
    first = 0
    while len({name[: first + 1] for name in different}) == 1:
        first += 1
    last = first
    while len({name[:last] for name in different}) < len(different):
        last += 1
    return ["-".join(name[first:last]) for name in words]


def results(comparison: Comparison) -> Table:
    """How fast, how good; every layout has a row, those that failed, too."""
    rows = []
    for layout in comparison.layouts:
        done = [r for r in layout.records if r.performance]
        cells = [COLUMNS[name](*done) if done else NOTHING for name in MEASURED]
        count = len(layout.records)
        runs = f"{count} of {layout.num_runs}" if layout.num_runs > 1 else NOTHING
        if layout.why:
            ended = "failed"
        elif count < layout.num_runs:
            ended = f"{layout.num_runs - count} of {layout.num_runs} not run yet"
        else:
            ended = status(layout.records[-1])
        rows.append([layout.name, *cells, runs, ended])
    about = "Median step of each run"
    if any(len(layout.records) > 1 for layout in comparison.layouts):
        about += "; mean ± standard deviation over the seeds"
    headers = [comparison.rows, *MEASURED, "runs", "status"]
    return _table("Results", f"{about}.", headers, rows)


def predictions(comparison: Comparison) -> Table:
    """What the plan said before each run."""
    done = comparison.finished if any(r.prediction for r in comparison.records) else []
    on_gpu = any(r.machine["gpu_name"] for r in comparison.records)
    what = "what tensors hold on the fullest GPU" if on_gpu else "RAM of the fullest process"
    about = f"Memory is {what}. Each prediction was made before its run"
    headers = [comparison.rows]
    for name, (heading, found, said) in PREDICTED.items():
        headers += [f"{heading} measured", f"{heading} predicted", f"{heading} off"]
        errors = [_error(said, found, [r]) for r in comparison.records]
        sizes = [abs(error) for error in errors if error is not None]
        if sizes:
            near = sum(size <= 0.10 for size in sizes)
            about += f"; {name}: {near} of {len(sizes)} within 10%, median {median(sizes):.0%} off"
    rows = []
    for layout in done:
        runs = layout.records
        row = [layout.name]
        for _, found, said in PREDICTED.values():
            error = _error(said, found, runs)
            row += [found(*runs), said(*runs), NOTHING if error is None else f"{error:+.0%}"]
        bound = {r.prediction["bound_by"] for r in runs if r.prediction} - {None}
        rows.append([*row, ", ".join(sorted(bound)) or NOTHING])
    return _table("Prediction and measurement", f"{about}.", [*headers, "mostly"], rows)


def _error(said: Number, found: Number, records: Sequence[Record]) -> float | None:
    """Prediction by measurement, less one."""
    expected = said.mean(records)
    measured = found.mean(records)
    return expected / measured - 1 if expected and measured else None


def _memory_parts(r: Record) -> dict[str, float]:
    """Component -> predicted bytes of the fullest process; without a GPU with what Python and the
    libraries take."""
    if r.prediction is None:
        return {}
    parts = dict(r.prediction["memory_bytes"])
    if not r.machine["gpu_name"]:
        parts["Python"] = r.prediction["host_bytes"] - sum(parts.values())
    return parts


def _parts_table(
    title: str, about: str, first: str, parts: Mapping[str, dict[str, Any]], prefix: str = ""
) -> Table:
    """A row a layout, a column a part (in bytes), and the sum."""
    names = dict.fromkeys(part for each in parts.values() for part in each)
    rows = []
    for name, each in parts.items():
        sizes = [*(each.get(part) for part in names), sum(each.values())]
        rows.append([name, *(gib(size) if size else NOTHING for size in sizes)])
    return _table(title, about, [first, *(prefix + name for name in names), "in all"], rows)


def _table(title: str, about: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Without the columns that say nothing."""
    told = [[NOTHING if cell == NOT_MEASURED else cell for cell in row] for row in rows]
    kept = [place for place in range(len(headers)) if any(row[place] != NOTHING for row in told)]
    return Table(
        title=title,
        about=about,
        headers=[headers[place] for place in kept],
        rows=[[row[place] for place in kept] for row in told],
    )
