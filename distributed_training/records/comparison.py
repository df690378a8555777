"""Runs that did the same work, side by side: by layout, in tables."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from distributed_training.records.display import NOT_MEASURED, gib, last_part, short_path
from distributed_training.records.record import Record, is_alive
from distributed_training.records.tables import (
    COLUMNS,
    MS_A_STEP,
    MS_PREDICTED,
    SETTINGS,
    Number,
    measured_peak,
    predicted,
    predicted_peak,
)

NOTHING = "-"
Parts = Callable[[Record], Mapping[str, float]]  # name -> bytes
MEASURED = (
    "tokens/s", "ms a step", "MFU", "peak GPU memory", "peak host memory", "bubble",
    "training loss", "validation loss", "validation perplexity",
)  # fmt: skip
_IN_SETTINGS = {"model", "dataset", "max_length", "precision"}
_PEAK = Number(measured_peak, gib)
_PEAK_PREDICTED = Number(predicted_peak, gib)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One row: a way to do the work and its runs, a seed each, or a run by itself."""

    name: str
    records: list[Record]
    num_runs: int = 1  # that are wanted
    why: str = ""  # there are fewer

    @property
    def ended(self) -> str:
        """How its runs ended, in a cell."""
        if self.why:
            return "failed"
        missing = self.num_runs - len(self.records)
        return f"{missing} of {self.num_runs} not run yet" if missing else status(self.records[-1])


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
        """Layouts with results."""
        found = [[r for r in layout.records if r.performance] for layout in self.layouts]
        pairs = zip(self.layouts, found, strict=True)
        return [Layout(name=layout.name, records=records) for layout, records in pairs if records]

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
        found = [
            results(self),
            predictions(self),
            _parts_table("Memory by component", fullest, self, memory_parts),
            _parts_table("Bytes sent a step", sends, self, sent_bytes, "over "),
        ]
        return [table for table in found if len(table.headers) > 1]


def differing(runs: Sequence[Mapping[str, Any]], missing: Any = None) -> list[str]:
    """The keys whose values are not equal in all."""
    keys = dict.fromkeys(key for run in runs for key in run)
    return [key for key in keys if len({repr(run.get(key, missing)) for run in runs}) > 1]


def common_settings(records: Sequence[Record]) -> dict[str, str]:
    """The settings that are equal in all."""
    found = {name: {cell(r) for r in records} for name, cell in SETTINGS.items()}
    return {name: cells.pop() for name, cells in found.items() if len(cells) == 1}


def overfitting(r: Record) -> str:
    """Where the validation loss was lowest, if it has risen since."""
    seen = [(row["loss"], row["step"]) for row in r.evaluations if row["loss"] is not None]
    if not seen or seen[-1][0] <= 1.01 * min(seen)[0]:
        return ""
    lowest, step = min(seen)
    last = seen[-1][0]
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
    names = dict(zip(map(id, records), run_names(records), strict=True))
    telling = differing([record.work for record in records], missing=...)
    groups: dict[str, list[Record]] = {}
    for record in reversed(records):
        work = repr([record.work.get(key, ...) for key in telling])
        groups.setdefault(work, []).insert(0, record)
    said = [key for key in telling if key not in _IN_SETTINGS]
    if len(telling) > 1:  # a hash tells a reader least
        said = [key for key in said if key != "data_fingerprint"]
    found = []
    for group in groups.values():
        common = common_settings(group)
        layouts = []
        for r in group:
            own = [f"{name} {cell(r)}" for name, cell in SETTINGS.items() if name not in common]
            name = f"{names[id(r)]} {COLUMNS['strategy'](r)}".lstrip()
            layouts.append(Layout(name=", ".join([name, *own]), records=[r]))
        differs = ", ".join(f"{key} {last_part(str(group[0].work.get(key)))[:12]}" for key in said)
        found.append(Comparison(layouts=layouts, work=differs, rows="run"))
    return found


def run_names(records: Sequence[Record]) -> list[str]:
    """What tells the names of the runs' folders apart: the first words that do. Empty for the only
    run."""
    if len(records) == 1:
        return [""]
    words = [tuple(Path(r.run_dir).name.split("-")) for r in records]
    different = set(words)
    if len(different) < 2:
        return ["-".join(name) for name in words]
    longest = range(max(map(len, words)) + 1)
    first = max(n for n in longest if len({name[:n] for name in different}) == 1)
    last = min(n for n in longest if len({name[:n] for name in different}) == len(different))
    return ["-".join(name[first:last]) for name in words]


def describe_runs(records: Sequence[Record]) -> str:
    """Where the runs lie whose short names are in the tables."""
    if len(records) == 1:
        return short_path(records[0].run_dir)
    place = os.path.commonpath([r.run_dir for r in records])
    return f"{len(records)} runs in {short_path(place)}"


def results(comparison: Comparison) -> Table:
    """How fast, how good; every layout has a row, those that failed, too."""
    rows = []
    for layout in comparison.layouts:
        done = [r for r in layout.records if r.performance]
        cells = [COLUMNS[name](*done) if done else NOTHING for name in MEASURED]
        runs = f"{len(layout.records)} of {layout.num_runs}"
        rows.append([layout.name, *cells, runs if layout.num_runs > 1 else NOTHING, layout.ended])
    about = "Median step of each run"
    if any(len(layout.records) > 1 for layout in comparison.layouts):
        about += "; mean ± standard deviation over the seeds"
    headers = [comparison.rows, *MEASURED, "runs", "status"]
    return _table("Results", f"{about}.", headers, rows)


def predictions(comparison: Comparison) -> Table:
    """What the plan said before each run."""
    rows = []
    for layout in comparison.finished:
        done = layout.records
        bound = {str(predicted("bound_by")(r)) for r in done} - {"None"}
        rows.append([
            layout.name, MS_A_STEP(*done), MS_PREDICTED(*done), off(MS_PREDICTED, MS_A_STEP, done),
            _PEAK(*done), _PEAK_PREDICTED(*done), off(_PEAK_PREDICTED, _PEAK, done),
            ", ".join(sorted(bound)) or NOTHING,
        ])  # fmt: skip
    if not any(r.prediction for r in comparison.records):
        rows = []
    on_gpu = any(r.machine["gpu_name"] for r in comparison.records)
    what = "what tensors hold on the fullest GPU" if on_gpu else "RAM of the fullest process"
    headers = [comparison.rows, "ms measured", "ms predicted", "ms off", "peak measured",
               "peak predicted", "peak off", "mostly"]  # fmt: skip
    about = f"Memory is {what}. Each prediction was made before its run"
    for name, said, found in (
        ("time", MS_PREDICTED, MS_A_STEP), ("memory", _PEAK_PREDICTED, _PEAK)
    ):  # fmt: skip
        both = [(said.mean([r]), found.mean([r])) for r in comparison.records]
        errors = [abs(a / b - 1) for a, b in both if a and b]
        if errors:
            near = sum(error <= 0.10 for error in errors)
            about += (
                f"; {name}: {near} of {len(errors)} within 10%, median {median(errors):.0%} off"
            )
    return _table("Prediction and measurement", f"{about}.", headers, rows)


def off(said: Number, found: Number, records: Sequence[Record]) -> str:
    """Prediction by measurement, less one."""
    expected = said.mean(records)
    measured = found.mean(records)
    return f"{expected / measured - 1:+.0%}" if expected and measured else NOTHING


def memory_parts(r: Record) -> Mapping[str, float]:
    """Component -> predicted bytes of the fullest process; without a GPU with what Python and the
    libraries take."""
    if r.prediction is None:
        return {}
    parts = dict(r.prediction["memory_bytes"])
    if not r.machine["gpu_name"]:
        parts["Python"] = r.prediction["host_bytes"] - sum(parts.values())
    return parts


def sent_bytes(r: Record) -> Mapping[str, float]:
    """Axis -> predicted bytes a step of the process that sends most."""
    return (r.prediction or {}).get("sent_bytes", {})


def _parts_table(
    title: str, about: str, comparison: Comparison, parts_of: Parts, prefix: str = ""
) -> Table:
    """A column a part, and the sum."""
    parts = {layout.name: parts_of(layout.records[0]) for layout in comparison.finished}
    names = dict.fromkeys(part for each in parts.values() for part, size in each.items() if size)
    rows = [
        [
            name,
            *(gib(each[part]) if each.get(part) else NOTHING for part in names),
            gib(sum(each.values())) if any(each.values()) else NOTHING,
        ]
        for name, each in parts.items()
    ]
    headers = [comparison.rows, *(f"{prefix}{name}" for name in names), "in all"]
    return _table(title, about, headers, rows)


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
