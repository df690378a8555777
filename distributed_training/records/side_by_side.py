"""The page of `compare`: the same work under several layouts, over seeds, in tables and plots."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from tabulate import tabulate

from distributed_training.records.display import WIDTH, gib
from distributed_training.records.record import Record
from distributed_training.records.tables import MARKDOWN

MIB = 2**20
NOTHING = "-"
Value = Callable[[Record], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One way to do the work, and its runs."""

    name: str
    records: list[Record]  # those that finished, a seed each
    num_runs: int  # that are wanted
    why: str = ""  # there are fewer

    @property
    def ended(self) -> str:
        """How its runs ended, in a cell."""
        if self.why:
            return "failed"
        missing = self.num_runs - len(self.records)
        return f"{missing} of {self.num_runs} not run yet" if missing else "ok"

    def values(self, value: Value) -> list[float]:
        """What a figure is in each run that has it."""
        found = [value(record) for record in self.records]
        return [number for number in found if number is not None and math.isfinite(number)]

    def mean(self, value: Value) -> float | None:
        found = self.values(value)
        return statistics.fmean(found) if found else None

    def with_spread(self, value: Value, form: str, scale: float = 1.0) -> str:
        """Mean, and standard deviation where there are several runs."""
        found = [scale * number for number in self.values(value)]
        if not found:
            return NOTHING
        text = form.format(statistics.fmean(found))
        return f"{text} ± {form.format(statistics.stdev(found))}" if len(found) > 1 else text


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Layouts that did the same work."""

    work: str  # what was asked for, in words
    layouts: list[Layout]

    @property
    def records(self) -> list[Record]:
        return [record for layout in self.layouts for record in layout.records]

    @property
    def finished(self) -> list[Layout]:
        """Layouts with results."""
        return [layout for layout in self.layouts if layout.records]

    @property
    def title(self) -> str:
        """What all runs have in common."""
        if not self.records:
            return self.work
        r = self.records[0]
        device = r.machine["gpu_name"] or f"CPU ({r.machine['num_cpus']} cores)"
        model, length, precision = (r.config[key] for key in ("model", "max_length", "precision"))
        batch = f"{r.batch.global_batch_size} x {length} tokens a step"
        return f"{model}, {r.world_size} x {device}, {batch}, {precision}, {r.num_steps} steps"

    @property
    def differences(self) -> list[str]:
        """Parts of the work in which runs differ, though all were asked for the same."""
        works = [record.work for record in self.records]
        keys = dict.fromkeys(key for work in works for key in work if key != "seed")
        return [key for key in keys if len({repr(work.get(key)) for work in works}) > 1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """One table of the page."""

    title: str
    headers: list[str]
    rows: list[list[str]]
    about: str


def tokens_per_s(r: Record) -> Any:
    return r.performance.get("tokens_per_s")


def step_s(r: Record) -> Any:
    return r.performance.get("step_time_s", {}).get("p50")


def final_loss(r: Record) -> Any:
    """Validation loss at the end; None for a run that was not evaluated since it began."""
    last = r.evaluations[-1] if r.evaluations else {"step": 0}
    return last["loss"] if last["step"] else None


def measured_peak(r: Record) -> Any:
    """Of what tensors hold on a GPU, else of a process's RAM; the fullest process's."""
    on_gpu = r.memory.get("peak_allocated_bytes")
    return r.memory.get("peak_host_bytes") if on_gpu is None else on_gpu


def predicted(name: str) -> Value:
    return lambda r: None if r.prediction is None else r.prediction.get(name)


def predicted_peak(r: Record) -> Any:
    """What `measured_peak` is to be."""
    return predicted("peak_bytes" if r.machine["gpu_name"] else "host_bytes")(r)


def memory_parts(r: Record) -> Mapping[str, float]:
    """Component -> predicted bytes of the fullest process; without a GPU with what Python and the
    libraries take."""
    if r.prediction is None:
        return {}
    parts = dict(r.prediction["memory_bytes"])
    if not r.machine["gpu_name"]:
        parts["Python"] = r.prediction["host_bytes"] - sum(parts.values())
    return parts


def sent(r: Record) -> Mapping[str, float]:
    """Axis -> predicted bytes a step of the process that sends most."""
    return (r.prediction or {}).get("sent_bytes", {})


def error(layout: Layout, said: Value, found: Value) -> str:
    """Prediction by measurement, less one."""
    values = layout.mean(said), layout.mean(found)
    return f"{values[0] / values[1] - 1:+.0%}" if values[0] and values[1] else NOTHING


def all_tables(comparison: Comparison) -> list[Table]:
    """Those that there are figures for."""
    found = [results_table(comparison)]
    if comparison.finished:
        found += [prediction_table(comparison), memory_table(comparison), sent_table(comparison)]
    return found


def results_table(comparison: Comparison) -> Table:
    """How fast, how good; every layout has a row, those that failed, too."""
    rows = []
    for layout in comparison.layouts:
        mfu = layout.mean(lambda r: r.performance.get("mfu"))
        rows.append([
            layout.name,
            layout.with_spread(tokens_per_s, "{:,.0f}"),
            layout.with_spread(step_s, "{:,.1f}", 1000),
            NOTHING if mfu is None else f"{mfu:.1%}",
            gib(peak) if (peak := layout.mean(measured_peak)) else NOTHING,
            layout.with_spread(final_loss, "{:.4f}"),
            f"{len(layout.records)} of {layout.num_runs}",
            layout.ended,
        ])  # fmt: skip
    headers = ["strategy", "tokens/s", "ms a step", "MFU", "peak memory", "validation loss",
               "runs", "ended"]  # fmt: skip
    several = any(len(layout.records) > 1 for layout in comparison.layouts)
    about = "Median step of each run" + "; mean ± standard deviation over the seeds" * several
    return _without_empty("Results", headers, rows, about + ".")


def prediction_table(comparison: Comparison) -> Table:
    """What the plan said before each run."""
    rows = []
    for layout in comparison.finished:
        said = layout.mean(predicted("step_time_s"))
        bound = {str(predicted("bound_by")(r)) for r in layout.records} - {"None"}
        rows.append([
            layout.name,
            layout.with_spread(step_s, "{:,.1f}", 1000),
            NOTHING if said is None else f"{1000 * said:,.1f}",
            error(layout, predicted("step_time_s"), step_s),
            *(gib(size) if (size := layout.mean(value)) else NOTHING
              for value in (measured_peak, predicted_peak)),
            error(layout, predicted_peak, measured_peak),
            ", ".join(sorted(bound)) or NOTHING,
        ])  # fmt: skip
    on_gpu = any(record.machine["gpu_name"] for record in comparison.records)
    what = "what tensors hold on the fullest GPU" if on_gpu else "RAM of the fullest process"
    headers = ["strategy", "ms measured", "ms predicted", "ms off", "peak measured",
               "peak predicted", "peak off", "mostly"]  # fmt: skip
    return _without_empty("Prediction and measurement", headers, rows, f"Memory is {what}.")


def memory_table(comparison: Comparison) -> Table:
    """Components of the peak, as predicted."""
    parts = {layout.name: memory_parts(layout.records[0]) for layout in comparison.finished}
    names = [name for name in dict.fromkeys(n for each in parts.values() for n in each)
             if any(each.get(name) for each in parts.values())]  # fmt: skip
    rows = [
        [name, *(gib(each[part]) if each.get(part) else NOTHING for part in names),
         gib(sum(each.values()))]
        for name, each in parts.items() if each
    ]  # fmt: skip
    about = "Of the fullest process at its fullest moment, as predicted."
    return _without_empty("Memory by component", ["strategy", *names, "in all"], rows, about)


def sent_table(comparison: Comparison) -> Table:
    """Traffic by axis."""
    found = {layout.name: sent(layout.records[0]) for layout in comparison.finished}
    axes = dict.fromkeys(axis for each in found.values() for axis, size in each.items() if size)
    rows = [
        [name, *(_mib(each.get(axis, 0)) for axis in axes), _mib(sum(each.values()))]
        for name, each in found.items()
    ]
    headers = ["strategy", *(f"over {axis}" for axis in axes), "in all"]
    about = "Of the process that sends most, by formula (strategies/LAWS.md), collectives as rings."
    return _without_empty("Bytes sent a step", headers, rows * bool(axes), about)


def _mib(size: float) -> str:
    return f"{size / MIB:,.2f} MiB" if size else NOTHING


def _without_empty(
    title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], about: str
) -> Table:
    """A table without the columns that say nothing."""
    kept = [i for i in range(len(headers)) if any(row[i] != NOTHING for row in rows)]
    headers = [headers[i] for i in kept]
    return Table(title=title, headers=headers, rows=[[r[i] for i in kept] for r in rows],
                 about=about)  # fmt: skip


def notes(comparison: Comparison) -> list[str]:
    """What a reader must know besides: why runs failed, and whether they can be compared."""
    found = [f"{layout.name} failed: {layout.why}" for layout in comparison.layouts if layout.why]
    if keys := comparison.differences:
        found.append(f"The runs did not do the same work: they differ in {', '.join(keys)}.")
    return found


def screen(comparison: Comparison) -> str:
    """The results in a terminal of 80 columns, why a run failed below."""
    table = results_table(comparison)
    shown = [i for i, header in enumerate(table.headers) if header not in ("runs", "ended", "MFU")]
    rows = [[row[i] for i in shown] for row in table.rows]
    headers = [table.headers[i] for i in shown]
    align = ["left", *["right"] * (len(shown) - 1)]
    text = tabulate(
        [headers, *rows], tablefmt="plain", disable_numparse=True, colalign=align,
        maxcolwidths=[26, *[None] * (len(shown) - 1)],
    )  # fmt: skip
    return "\n".join([text, *(textwrap.fill(note, WIDTH) for note in notes(comparison))])


def markdown(
    heading: str, comparisons: Sequence[Comparison], plots: Sequence[Sequence[Path]]
) -> str:
    """The page for a repository; `plots` of each comparison lie beside it."""
    lines = ["# Strategies side by side", "", heading]
    for comparison, paths in zip(comparisons, plots, strict=True):
        lines += [
            "",
            f"## {comparison.title}",
            *(line for n in notes(comparison) for line in ("", n)),
        ]
        for table in filter(lambda table: table.rows, all_tables(comparison)):
            text = tabulate(table.rows, table.headers, **MARKDOWN)
            lines += ["", f"### {table.title}", "", table.about, "", text]
        lines += [line for path in paths for line in ("", f"![{path.stem}]({path.name})")]
    return "\n".join([*lines, ""])


def html(heading: str, comparisons: Sequence[Comparison]) -> str:
    """The same in one file that needs no other."""
    from distributed_training.records import page  # with matplotlib, which is slow to import
    from distributed_training.records.plots import PHONE, as_svgs
    from distributed_training.records.side_plots import build_figures

    parts = [f"<p>{escape(heading)}</p>"]
    for number, comparison in enumerate(comparisons, 1):
        parts.append(f"<h2>{escape(comparison.title)}</h2>")
        parts += [f"<p>{escape(note)}</p>" for note in notes(comparison)]
        pictures = as_svgs(lambda c=comparison: build_figures(c, PHONE), str(number))  # type: ignore[misc]
        parts.append(page.html_plots(pictures))
        for table in filter(lambda table: table.rows, all_tables(comparison)):
            numbers = [header not in ("strategy", "ended", "mostly") for header in table.headers]
            parts += [f"<h3>{escape(table.title)}</h3>", f"<p>{escape(table.about)}</p>",
                      page.html_table(table.headers, table.rows, numbers)]  # fmt: skip
    return page.whole_page("Strategies side by side", parts)
