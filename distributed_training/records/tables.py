"""Define the columns of result tables, and build tables that compare runs with the same work.
`Record.work` describes the work of a run: the model, the data, the global batch and other
settings."""

import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed_training.records.display import (
    best_if_overfitted,
    bottleneck_name,
    format_bytes,
    short_name,
)
from distributed_training.records.record import Record, is_alive
from distributed_training.settings.files import plural

Value = Callable[[Record], float | None]
EMPTY_CELL = "-"
_LONGEST_ERROR = 300  # maximum length of a run's error in a table's notes, in characters
_KEYS_IN_SETTINGS = {"model", "dataset", "max_length", "precision"}


@dataclass(frozen=True)
class NumberColumn:
    """Column of numbers. A cell shows the value of one run, or the mean over several runs."""

    value: Value
    show: Callable[[float], str]
    missing: str = EMPTY_CELL
    show_std: bool = False  # show the standard deviation over several runs

    def values(self, records: Sequence[Record]) -> list[float]:
        """Return the runs' values in this column. Runs without a value are left out."""
        return [value for r in records if (value := self.value(r)) is not None]

    def __call__(self, *records: Record) -> str:
        values = self.values(records)
        if not values:
            return self.missing
        text = self.show(statistics.fmean(values))
        if self.show_std and len(values) > 1:
            text += f" ± {self.show(statistics.stdev(values))}"
        return text


def predicted(name: str) -> Value:
    return lambda r: (r.prediction or {}).get(name)


def nan_if_none(value: float | None) -> float:
    """Return `value`, or NaN for None, which represents a non-finite number in a record."""
    return float("nan") if value is None else value


def _from_last_evaluation(name: str) -> Value:
    """Return a function that reads the value `name` from a run's last evaluation. The function
    returns None if there was no evaluation after training began."""

    def value(r: Record) -> float | None:
        last = r.evaluations[-1] if r.evaluations else {"step": 0}
        return nan_if_none(last[name]) if last["step"] and name in last else None

    return value


def _peak_bytes(r: Record) -> float | None:
    """Return the peak size in bytes of the tensors on the GPU with the highest peak. Without GPUs,
    return the peak RAM in bytes of the process with the highest peak."""
    on_gpu = r.memory.get("peak_allocated_bytes")
    return r.memory.get("peak_host_bytes") if on_gpu is None else on_gpu


def _predicted_peak_bytes(r: Record) -> float | None:
    return predicted("peak_bytes" if r.machine["gpu_name"] else "host_bytes")(r)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}"


# Columns that show the settings of runs, except the strategy
SETTINGS: dict[str, Callable[..., str]] = {
    "model": lambda r: short_name(r.config["model"]),
    "processes": lambda r: str(r.world_size),
    "batch": lambda r: f"{r.batch.micro_batch_size} x {r.config['max_length']}",
    "precision": lambda r: r.config["precision"],
    "compile": lambda r: {False: "no", True: "yes"}.get(r.config["compile"], r.config["compile"]),
    "dataset": lambda r: short_name(r.config["dataset"]),
}
STEP_MS = NumberColumn(
    lambda r: r.performance.get("step_time_s", {}).get("p50"), _milliseconds, show_std=True
)
PREDICTED_STEP_MS = NumberColumn(predicted("step_time_s"), _milliseconds)
# GPU memory is the memory that PyTorch's allocator reserved. The "allocated" memory would exclude
# the buffers of CUDA graphs.
MEASURED = {
    "tokens/s": NumberColumn(
        lambda r: r.performance.get("tokens_per_s"), "{:,.0f}".format, show_std=True
    ),
    "ms per step": STEP_MS,
    "MFU": NumberColumn(lambda r: r.performance.get("mfu"), "{:.1%}".format),
    "peak GPU memory": NumberColumn(lambda r: r.memory.get("peak_reserved_bytes"), format_bytes),
    "peak RAM": NumberColumn(lambda r: r.memory.get("peak_host_bytes"), format_bytes),
    "training loss": NumberColumn(
        lambda r: nan_if_none(r.loss_curve[-1][1]) if r.loss_curve else None,
        "{:.3f}".format,
        show_std=True,
    ),
    "validation loss": NumberColumn(_from_last_evaluation("loss"), "{:.4f}".format, show_std=True),
    "validation perplexity": NumberColumn(
        _from_last_evaluation("perplexity"), "{:.1f}".format, show_std=True
    ),
    "bits per byte": NumberColumn(
        _from_last_evaluation("bits_per_byte"), "{:.4f}".format, show_std=True
    ),
}
PREDICTED = {  # name -> heading, measured, predicted
    "time": ("ms per step", STEP_MS, PREDICTED_STEP_MS),
    "memory": (
        "peak",
        NumberColumn(_peak_bytes, format_bytes),
        NumberColumn(_predicted_peak_bytes, format_bytes),
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutRow:
    """Row of a table: a layout with one run per seed, or a single run."""

    name: str
    records: list[Record]
    num_requested_runs: int = 1
    why: str = ""  # reason why there are fewer records than requested runs

    @property
    def finished_records(self) -> list[Record]:
        """Return the records of runs that have results."""
        return [r for r in self.records if r.performance]

    @property
    def status_text(self) -> str:
        """Describe the status of the runs in a few words."""
        num_missing = self.num_requested_runs - len(self.records)
        if self.why:
            return "failed"
        return (
            f"{num_missing} of {self.num_requested_runs} not run yet"
            if num_missing
            else status(self.records[-1])
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Table of strings. The first column contains the row names."""

    title: str
    about: str
    columns: dict[str, list[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Layouts whose runs did the same work."""

    layouts: list[LayoutRow]
    work_description: str = ""  # description of the work, if there are no records
    # Key of the work -> value, for keys whose values differ between comparisons
    differing_settings: dict[str, str] = field(default_factory=dict)
    row_heading: str = "strategy"  # heading of the first column

    @property
    def records(self) -> list[Record]:
        return [record for layout in self.layouts for record in layout.records]

    @property
    def finished(self) -> list[LayoutRow]:
        return [layout for layout in self.layouts if layout.finished_records]

    @property
    def settings(self) -> dict[str, str]:
        """Return the settings that all runs share, keyed by heading."""
        if not self.records:
            return {}
        settings = common_settings(self.records)
        settings["device"] = self.records[0].machine["gpu_name"] or "CPU"
        return settings | self.differing_settings

    @property
    def title(self) -> str:
        """Describe the comparison on one line: the settings that all its runs share, the work, and
        the settings that distinguish this comparison from others."""
        settings = self.settings
        device = settings.pop("device", "")
        differing_values = [f"{name} {settings.pop(name)}" for name in self.differing_settings]
        common = [f"{name} {value}" for name, value in settings.items()]
        text = ", ".join(filter(None, [*common, device and f"on {device}"]))
        return "; ".join(filter(None, [text, self.work_description, ", ".join(differing_values)]))

    @property
    def notes(self) -> list[str]:
        """Return sentences about failed runs and overfitting. If the runs are not comparable, also
        name the settings in which they differ."""
        notes = [f"{layout.name} failed: {layout.why}" for layout in self.layouts if layout.why]
        for layout in self.layouts:
            for r in filter(lambda record: record.error, layout.records):
                error = str(r.error)
                end = " ..." if len(error) > _LONGEST_ERROR else ""
                notes.append(f"{layout.name} {r.status}: {error[:_LONGEST_ERROR]}{end}")
            for r in layout.records:
                if best := best_if_overfitted(r):
                    result = "overfitted" if best["step"] else "did not learn"
                    text = f"{layout.name} {result}: its validation loss was {best['loss']:.3f} "
                    text += (
                        f"after step {best['step']} and {r.evaluations[-1]['loss']:.3f} at the end."
                    )
                    notes.append(text)
        works = [record.work for record in self.records]
        if keys := [key for key in differing_keys(works) if key != "seed"]:
            notes.append(f"The runs are not comparable, because they differ in {', '.join(keys)}.")
        return notes

    def tables(self) -> list[Table]:
        """Return the tables that contain data."""
        memory_about = "Predicted peak memory of the process that uses the most memory."
        sent_about = "Predicted bytes that the busiest process sends, from the formulas for ring "
        sent_about += "collectives in strategies/LAWS.md."
        tables = [
            build_results_table(self),
            build_predictions_table(self),
            _build_breakdown("Memory by component", memory_about, self, _memory_by_component),
            _build_breakdown("Bytes sent per step", sent_about, self, _sent_by_axis),
        ]
        return [table for table in tables if len(table.columns) > 1]


def differing_keys(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values differ between the runs."""
    keys = dict.fromkeys(key for run in runs for key in run)
    return [key for key in keys if len({repr(run.get(key)) for run in runs}) > 1]


def common_settings(records: Sequence[Record]) -> dict[str, str]:
    """Return the settings in SETTINGS that are equal in all runs. Each setting's name is mapped to
    its displayed value."""
    settings = [{name: cell(r) for name, cell in SETTINGS.items()} for r in records]
    different_names = differing_keys(settings)
    return {name: text for name, text in settings[0].items() if name not in different_names}


def status(r: Record) -> str:
    """Return the status of a run, such as "ok", or "killed 12/100" after 12 of 100 steps."""
    if r.status == "ok":
        return "ok"
    killed = r.status == "running" and r.hostname == platform.node() and not is_alive(r)
    word = "killed" if killed else r.status
    # The record of a run that did not end as planned may lack the steps after the last checkpoint.
    return f"{word} {r.step}/{r.num_steps}" if r.step or r.status == "running" else word


def group_by_work(records: Sequence[Record]) -> list[Comparison]:
    """Group runs that did the same work into comparisons. The comparison that contains the newest
    run comes first. Each run has its own row."""
    records = sorted(records, key=lambda r: r.started_at)
    different_keys = differing_keys([record.work for record in records])
    groups: dict[str, list[tuple[str, Record]]] = {}
    for name, r in reversed([*zip(run_names(records), records, strict=True)]):
        work = repr([r.work.get(key) for key in different_keys])
        groups.setdefault(work, []).insert(0, (name, r))
    shown_keys = [key for key in different_keys if key not in _KEYS_IN_SETTINGS]
    if len(different_keys) > 1:  # a hash is shown only if there is no other difference
        shown_keys = [key for key in shown_keys if key != "data_fingerprint"]
    comparisons = []
    for group in groups.values():
        common = common_settings([r for _, r in group])
        layouts = []
        for name, r in group:
            texts = [f"{name} {r.layout_name}".lstrip()]
            texts += [f"{key} {cell(r)}" for key, cell in SETTINGS.items() if key not in common]
            layouts.append(LayoutRow(name=", ".join(texts), records=[r]))
        first = group[0][1].work
        differing_settings = {key: short_name(str(first.get(key)))[:12] for key in shown_keys}
        comparisons.append(
            Comparison(layouts=layouts, differing_settings=differing_settings, row_heading="run")
        )
    return comparisons


def run_names(records: Sequence[Record]) -> list[str]:
    """Return a name for each run: the shortest part of its folder's name that distinguishes it from
    the other runs. The part consists of whole words. The name of a single run is ""."""
    names = [tuple(Path(r.run_dir).name.split("-")) for r in records]
    num_names = len(set(names))
    if num_names == 1:
        return ["" if len(names) == 1 else "-".join(name) for name in names]
    sizes = range(max(map(len, names)) + 1)
    # num_prefixes[size]: number of different prefixes of `size` words
    num_prefixes = [len({name[:size] for name in names}) for size in sizes]
    first = num_prefixes.count(1) - 1  # all names share the words before this index
    last = num_prefixes.index(num_names)
    return ["-".join(name[first:last]) for name in names]


def build_results_table(comparison: Comparison) -> Table:
    """Return the table of speed, memory and losses. Failed layouts also have a row."""
    layouts = comparison.layouts
    columns = {comparison.row_heading: [layout.name for layout in layouts]}
    for name, number in MEASURED.items():
        columns[name] = [number(*layout.finished_records) for layout in layouts]
    columns["runs"] = [
        f"{len(layout.records)} of {layout.num_requested_runs}"
        if layout.num_requested_runs > 1
        else EMPTY_CELL
        for layout in layouts
    ]
    columns["status"] = [layout.status_text for layout in layouts]
    about = "Each time is the median over the steps of a run."
    if any(len(layout.records) > 1 for layout in layouts):
        about += " Cells show the mean ± standard deviation over the seeds."
    if not any(r.machine["gpu_name"] for r in comparison.records):
        about += " Peak RAM is that of the process that uses the most, and it includes libraries."
    return _table("Results", about, columns)


def build_predictions_table(comparison: Comparison) -> Table:
    """Return the table that compares each plan's prediction with the measurements of its run."""
    records = comparison.records
    memory = "the peak RAM, including libraries, of the process that uses the most memory"
    if any(r.machine["gpu_name"] for r in records):
        memory = "the peak memory of tensors on the fullest GPU"
    about = f"The peak memory is {memory}. Each prediction was made before its run."
    layouts = comparison.finished if any(r.prediction for r in records) else []
    columns = {comparison.row_heading: [layout.name for layout in layouts]}
    for name, (heading, measurement, prediction) in PREDICTED.items():
        columns[f"{heading} measured"] = [
            measurement(*layout.finished_records) for layout in layouts
        ]
        columns[f"{heading} predicted"] = [
            prediction(*layout.finished_records) for layout in layouts
        ]
        errors = [_error(prediction, measurement, layout.finished_records) for layout in layouts]
        columns[f"{heading} error"] = [EMPTY_CELL if e is None else f"{e:+.0%}" for e in errors]
        run_errors = [_error(prediction, measurement, [r]) for r in records]
        if sizes := [abs(error) for error in run_errors if error is not None]:
            num_close = sum(size <= 0.10 for size in sizes)
            about += (
                f" {name.capitalize()}: {num_close} of "
                f"{plural(len(sizes), 'prediction')} within 10%, "
            )
            about += f"median error {statistics.median(sizes):.0%}."
    columns["bottleneck"] = []
    for layout in layouts:
        bottlenecks = {
            r.prediction["bound_by"] for r in layout.finished_records if r.prediction
        } - {None}
        columns["bottleneck"].append(
            ", ".join(sorted(map(bottleneck_name, bottlenecks))) or EMPTY_CELL
        )
    return _table("Prediction and measurement", about, columns)


def _error(
    prediction: NumberColumn, measurement: NumberColumn, records: Sequence[Record]
) -> float | None:
    """Return the error of the mean prediction relative to the mean measurement. Return None if a
    value is missing."""
    expected = prediction.values(records)
    actual = measurement.values(records)
    if not expected or not actual:
        return None
    return statistics.fmean(expected) / statistics.fmean(actual) - 1


def _memory_by_component(r: Record) -> dict[str, float]:
    prediction = r.prediction or {}
    components = dict(prediction.get("memory_bytes", {}))
    if components and not r.machine["gpu_name"]:  # add the memory of Python and libraries
        components["Python"] = prediction["host_bytes"] - sum(components.values())
    return components


def _sent_by_axis(r: Record) -> dict[str, float]:
    sent_bytes = (r.prediction or {}).get("sent_bytes", {})
    return {f"over {axis}": size for axis, size in sent_bytes.items()}


def _build_breakdown(
    title: str, about: str, comparison: Comparison, bytes_of: Callable[[Record], dict[str, float]]
) -> Table:
    """Return a table of sizes, with one row per layout, one column per component and a column for
    the total."""
    columns = {comparison.row_heading: [layout.name for layout in comparison.finished]}
    rows = [bytes_of(layout.finished_records[0]) for layout in comparison.finished]
    names = dict.fromkeys(name for row in rows for name in row)
    for row in rows:
        row["total"] = sum(row.values())
    for name in (*names, "total"):
        columns[name] = [
            format_bytes(size) if (size := row.get(name)) else EMPTY_CELL for row in rows
        ]
    return _table(title, about, columns)


def _table(title: str, about: str, columns: dict[str, list[str]]) -> Table:
    """Return a table without empty columns."""
    nonempty = {name: cells for name, cells in columns.items() if {*cells} - {EMPTY_CELL}}
    return Table(title=title, about=about, columns=nonempty)
