"""Define the columns of result tables, and build tables that compare runs with the same work.
`Record.work` describes the work of a run: the model, the data, the global batch and other
settings."""

import platform
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from distributed_training.records.display import (
    amount_of,
    describe_overfitting,
    describe_work,
    format_bytes,
    format_perplexity,
    short_name,
    short_path,
)
from distributed_training.records.record import BEST, Record, is_alive
from distributed_training.settings.files import plural

EMPTY_CELL = "-"
NOT_RUN = "not run yet"
_LONGEST_ERROR = 300  # maximum length of a run's error in a table's notes, in characters
_NAME_WIDTH = 26  # width of the first column on a terminal
# Left-aligned columns
TEXT_COLUMNS = {"run", "pick", "layout", "status", "verdict", "bottleneck"}


@dataclass(frozen=True)
class Column:
    """Column of a table. A cell shows the value of a run, or that the run has none."""

    value: Callable[[Record], Any]  # number or text; None if the record has no value
    show: Callable[[Any], str] = str

    def __call__(self, record: Record | None) -> str:
        value = None if record is None else self.value(record)
        return EMPTY_CELL if value is None else self.show(value)


def nan_if_none(value: float | None) -> float:
    """Return `value`, or NaN for None, which represents a non-finite number in a record."""
    return float("nan") if value is None else value


def _last_loss(r: Record) -> float | None:
    return nan_if_none(r.loss_curve[-1][1]) if r.loss_curve else None


def _from_last_evaluation(name: str) -> Callable[[Record], Any]:
    """Return a function that reads the value `name` from a run's last evaluation. The function
    returns None if there was no evaluation after training began."""

    def value(r: Record) -> float | None:
        if not r.evaluations or r.evaluations[-1]["step"] == 0:
            return None
        last = r.evaluations[-1]
        return nan_if_none(last[name]) if name in last else None

    return value


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}"


# Columns that show the settings of runs, except the strategy
SETTINGS = {
    "model": Column(lambda r: r.config["model"], short_name),
    "processes": Column(lambda r: str(r.world_size)),
    "batch": Column(lambda r: f"{r.batch.micro_batch_size} x {r.config['max_length']}"),
    "precision": Column(lambda r: r.config["precision"]),
    "compile": Column(lambda r: r.config["compile"]),
    "dataset": Column(lambda r: r.config["dataset"], short_name),
}
# GPU memory is the memory that PyTorch's allocator reserved. The "allocated" memory would exclude
# the buffers of CUDA graphs.
RESULTS = {
    "tokens/s": Column(lambda r: r.performance.get("tokens_per_s"), "{:,.0f}".format),
    "predicted tokens/s": Column(
        lambda r: (r.prediction or {}).get("tokens_per_s"), "{:,.0f}".format
    ),
    "ms per step": Column(lambda r: r.performance.get("step_time_s", {}).get("p50"), _milliseconds),
    "MFU": Column(lambda r: r.performance.get("mfu"), "{:.1%}".format),
    "reserved GPU memory": Column(lambda r: r.memory.get("peak_reserved_bytes"), format_bytes),
    "peak RAM": Column(lambda r: r.memory.get("peak_host_bytes"), format_bytes),
    "training loss": Column(_last_loss, "{:.3f}".format),
    "validation loss": Column(_from_last_evaluation("loss"), "{:.4f}".format),
    "validation perplexity": Column(_from_last_evaluation("perplexity"), "{:.1f}".format),
    "bits per byte": Column(_from_last_evaluation("bits_per_byte"), "{:.4f}".format),
    "reward accuracy": Column(_from_last_evaluation("reward_accuracy"), "{:.2f}".format),
}
# Columns of a comparison, because a terminal is narrow. The summary of each run has all of RESULTS.
_COMPARED = ("tokens/s", "reserved GPU memory", "validation loss")


@dataclass(kw_only=True)
class LayoutRow:
    """Row of a table: a run."""

    name: str
    record: Record | None = None  # None if the run has not started
    why: str = ""  # reason why a requested run did not start or failed; "" if there is none

    @property
    def finished_record(self) -> Record | None:
        """Return the record if the run has results."""
        return self.record if self.record and self.record.performance else None

    @property
    def status(self) -> str:
        """Describe the status of the run in a few words, such as "ok", or "killed 12/100" after 12
        of 100 steps."""
        if self.why:
            return "failed"
        r = self.record
        if r is None:
            return NOT_RUN
        word: str = r.status
        if word == "running" and r.hostname == platform.node() and not is_alive(Path(r.run_dir)):
            word = "killed"
        # The record of a run that did not end as planned may lack the steps after the last
        # checkpoint.
        has_steps = r.status != "ok" and (r.step or r.status == "running")
        return f"{word} {r.step}/{r.num_steps}" if has_steps else word


def describe_settings(records: Sequence[Record]) -> str:
    """Return the model and the other settings that all runs share."""
    common = {}
    for name, column in SETTINGS.items():
        texts = {column(r) for r in records}
        if len(texts) == 1:
            common[name] = texts.pop()
    model = common.get("model", "Runs")
    if records:
        common["device"] = records[0].machine["gpu_name"] or "CPU"
    return f"{model}: {', '.join(f'{name} {text}' for name, text in common.items())}"


def find_verdict(layouts: Sequence[LayoutRow]) -> str:
    """Return sentences about the amount of work and the fastest layout. If the runs are not
    comparable, name the settings in which they differ instead."""
    records = [layout.record for layout in layouts if layout.record]
    keys = [key for key in differing_keys([r.work for r in records]) if key != "seed"]
    if keys:
        return f"The runs are not comparable, because they differ in {', '.join(keys)}."
    speeds = []
    for layout in layouts:
        r = layout.finished_record
        if r is not None and r.performance["tokens_per_s"] is not None:
            speeds.append((r.performance["tokens_per_s"], layout.name))
    if len(speeds) < 2:
        return ""
    *_, (second_speed, second), (speed, first) = sorted(speeds)
    return (
        f"Each run trained on {describe_work(amount_of(records[0]))}. "
        f"{first} is the fastest, with {speed:,.0f} tokens/s, "
        f"{speed / second_speed:.3g} times {second}."
    )


def describe_problems(layouts: Sequence[LayoutRow]) -> list[str]:
    """Return sentences about failed runs and overfitting."""
    notes = [f"{layout.name} failed: {layout.why}" for layout in layouts if layout.why]
    for layout in layouts:
        r = layout.record
        if r is None or layout.why:
            continue
        if r.error:
            error = textwrap.shorten(r.error, _LONGEST_ERROR, placeholder=" ...")
            notes.append(f"{layout.name} {r.status}: {error}")
        overfitting = describe_overfitting(r)
        if overfitting:
            notes.append(f"{layout.name} {overfitting}.")
    return notes


def build_columns(layouts: Sequence[LayoutRow]) -> dict[str, list[str]]:
    """Return the columns of the table of speed, memory and losses. The first column contains the
    names of the layouts, and empty columns are left out. Failed layouts also have a row."""
    cells = {"run": [layout.name for layout in layouts]}
    for name in _COMPARED:
        texts = [RESULTS[name](layout.finished_record) for layout in layouts]
        if {*texts} - {EMPTY_CELL}:
            cells[name] = texts
    return {**cells, "status": [layout.status for layout in layouts]}


def summary_rows(r: Record) -> dict[str, str]:
    """Return the rows of a run's summary. Values that were not measured are left out."""
    rows = dict[str, str]()
    if len(r.evaluations) > 1 and "perplexity" in r.evaluations[0]:
        rows["perplexity before"] = format_perplexity(r.evaluations[0]["perplexity"])
    for name, column in RESULTS.items():
        if column.value(r) is not None:
            rows[name] = column(r)
    overfitting = describe_overfitting(r)
    if overfitting:
        advice = "To keep the best model, add --keep_best True."
        if r.best:
            advice = f"{BEST}/ contains the best model, and generate and eval use it."
        rows["result"] = f"{overfitting}. {advice}"
    if r.skipped_steps:
        rows["skipped"] = f"{plural(len(r.skipped_steps), 'step')} with non-finite gradients"
    return rows | {"record": f"{short_path(r.run_dir)}/record.json"}


def differing_keys(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values differ between the runs."""
    differing = []
    for key in dict.fromkeys(key for run in runs for key in run):
        values = {repr(run.get(key)) for run in runs}
        if len(values) > 1:
            differing.append(key)
    return differing


def format_table(columns: Mapping[str, list[str]]) -> str:
    """Return a table for a terminal."""
    headings = [name.replace(" ", "\n", 1) for name in columns]
    return tabulate(
        # The headings are a row of the table, because tabulate adds padding to its own headings.
        [headings, *zip(*columns.values(), strict=True)],
        tablefmt="plain",
        disable_numparse=True,
        colalign=["left" if name in TEXT_COLUMNS else "right" for name in columns],
        maxcolwidths=[_NAME_WIDTH, *[None] * (len(columns) - 1)],
    )
