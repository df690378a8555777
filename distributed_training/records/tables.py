"""What can be said of runs, by heading, and tables of runs that did the same work, side by side."""

import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed_training.records.display import best_before, gib, last_part
from distributed_training.records.record import Record, is_alive

Value = Callable[[Record], float | None]
NOTHING = "-"
_IN_SETTINGS = {"model", "dataset", "max_length", "precision"}


@dataclass(frozen=True)
class Number:
    """A number of each run: in a table, one run's or the mean over several."""

    value: Value
    show: Callable[[float], str]
    missing: str = NOTHING
    spread: bool = False  # with the standard deviation, where there are several

    def values(self, records: Sequence[Record]) -> list[float]:
        """Of the runs that have it."""
        return [value for r in records if (value := self.value(r)) is not None]

    def __call__(self, *records: Record) -> str:
        found = self.values(records)
        if not found:
            return self.missing
        text = self.show(statistics.fmean(found))
        if self.spread and len(found) > 1:
            text += f" ± {self.show(statistics.stdev(found))}"
        return text


def predicted(name: str) -> Value:
    return lambda r: (r.prediction or {}).get(name)


def finite(value: float | None) -> float:
    """What was not finite is None in a record."""
    return float("nan") if value is None else value


def _trained(name: str) -> Value:
    """An entry of the last evaluation; None where there was none since training began."""

    def value(r: Record) -> float | None:
        last = r.evaluations[-1] if r.evaluations else {"step": 0}
        return finite(last[name]) if last["step"] and name in last else None

    return value


def _peak(r: Record) -> float | None:
    """Return the bytes of tensors on the fullest GPU; on a CPU the RAM of the fullest process."""
    on_gpu = r.memory.get("peak_allocated_bytes")
    return r.memory.get("peak_host_bytes") if on_gpu is None else on_gpu


def _predicted_peak(r: Record) -> float | None:
    return predicted("peak_bytes" if r.machine["gpu_name"] else "host_bytes")(r)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}"


# What tells the settings of runs apart, besides the strategy.
SETTINGS: dict[str, Callable[..., str]] = {
    "model": lambda r: last_part(r.config["model"]),
    "processes": lambda r: str(r.world_size),
    "batch": lambda r: f"{r.batch.micro_batch_size} x {r.config['max_length']}",
    "precision": lambda r: r.config["precision"],
    "compile": lambda r: {False: "no", True: "yes"}.get(r.config["compile"], r.config["compile"]),
    "dataset": lambda r: last_part(r.config["dataset"]),
}
MS_A_STEP = Number(
    lambda r: r.performance.get("step_time_s", {}).get("p50"), _milliseconds, spread=True
)
MS_PREDICTED = Number(predicted("step_time_s"), _milliseconds)
# GPU memory is what PyTorch's allocator reserved: "allocated" leaves out buffers of CUDA graphs.
MEASURED = {
    "tokens/s": Number(lambda r: r.performance.get("tokens_per_s"), "{:,.0f}".format, spread=True),
    "ms per step": MS_A_STEP,
    "MFU": Number(lambda r: r.performance.get("mfu"), "{:.1%}".format),
    "peak GPU memory": Number(lambda r: r.memory.get("peak_reserved_bytes"), gib),
    "peak RAM": Number(lambda r: r.memory.get("peak_host_bytes"), gib),
    "training loss": Number(
        lambda r: finite(r.loss_curve[-1][1]) if r.loss_curve else None,
        "{:.3f}".format,
        spread=True,
    ),
    "validation loss": Number(_trained("loss"), "{:.4f}".format, spread=True),
    "validation perplexity": Number(_trained("perplexity"), "{:.1f}".format, spread=True),
    "bits per byte": Number(_trained("bits_per_byte"), "{:.4f}".format, spread=True),
}
PREDICTED = {  # what -> heading, measured, predicted
    "time": ("ms", MS_A_STEP, MS_PREDICTED),
    "memory": ("peak", Number(_peak, gib), Number(_predicted_peak, gib)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One row: a way to do the work and its runs, a seed each, or a run by itself."""

    name: str
    records: list[Record]
    num_runs: int = 1  # that are wanted
    why: str = ""  # there are fewer

    @property
    def done(self) -> list[Record]:
        """Runs with results."""
        return [r for r in self.records if r.performance]

    @property
    def ended(self) -> str:
        """How, in a word or two."""
        missing = self.num_runs - len(self.records)
        if self.why:
            return "failed"
        return f"{missing} of {self.num_runs} not run yet" if missing else status(self.records[-1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Columns of words and numbers as text; the first names the rows."""

    title: str
    about: str
    columns: dict[str, list[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Layouts that did the same work."""

    layouts: list[Layout]
    work: str = ""  # what was asked for, in words, where there are no records
    differs: dict[str, str] = field(default_factory=dict)  # keys of the work, unlike in others'
    rows: str = "strategy"  # what a row is

    @property
    def records(self) -> list[Record]:
        return [record for layout in self.layouts for record in layout.records]

    @property
    def finished(self) -> list[Layout]:
        return [layout for layout in self.layouts if layout.done]

    @property
    def settings(self) -> dict[str, str]:
        """What all runs have in common, by heading."""
        if not self.records:
            return {}
        found = common_settings(self.records)
        found["device"] = self.records[0].machine["gpu_name"] or "CPU"
        return found | self.differs

    @property
    def title(self) -> str:
        """What all runs have in common, on one line."""
        settings = self.settings
        device = settings.pop("device", "")
        other = [f"{name} {settings.pop(name)}" for name in self.differs]
        common = [f"{name} {value}" for name, value in settings.items()]
        text = ", ".join(filter(None, [*common, device and f"on {device}"]))
        return "; ".join(filter(None, [text, self.work, ", ".join(other)]))

    @property
    def notes(self) -> list[str]:
        """What a reader must know besides: why runs failed, and whether they can be compared."""
        found = [f"{layout.name} failed: {layout.why}" for layout in self.layouts if layout.why]
        for layout in self.layouts:
            found += [f"{layout.name} {r.status}: {r.error}" for r in layout.records if r.error]
            for r in layout.records:
                if best := best_before(r):
                    was = f"was {best['loss']:.3f} after step {best['step']}"
                    now = f"now {r.evaluations[-1]['loss']:.3f}"
                    found.append(f"{layout.name} overfitted: its validation loss {was}, {now}")
        works = [record.work for record in self.records]
        if differ := [key for key in differing(works) if key != "seed"]:
            found.append(f"The runs did not do the same work: they differ in {', '.join(differ)}.")
        return found

    def tables(self) -> list[Table]:
        """Those that there are figures for."""
        memory = "The prediction for the fullest process at its peak."
        sent = "The process that sends most; formulas of strategies/LAWS.md, collectives as rings."
        found = [
            results(self),
            predictions(self),
            _parts("Memory by component", memory, self, _memory),
            _parts("Bytes sent per step", sent, self, _sent),
        ]
        return [table for table in found if len(table.columns) > 1]


def differing(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values are not equal in all."""
    keys = dict.fromkeys(key for run in runs for key in run)
    return [key for key in keys if len({repr(run.get(key)) for run in runs}) > 1]


def common_settings(records: Sequence[Record]) -> dict[str, str]:
    """The columns of SETTINGS in which all agree."""
    settings = [{name: cell(r) for name, cell in SETTINGS.items()} for r in records]
    differ = differing(settings)
    return {name: text for name, text in settings[0].items() if name not in differ}


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
            words = [f"{name} {r.layout_name}".lstrip()]
            words += [f"{key} {cell(r)}" for key, cell in SETTINGS.items() if key not in common]
            layouts.append(Layout(name=", ".join(words), records=[r]))
        first = group[0][1].work
        differs = {key: last_part(str(first.get(key)))[:12] for key in said}
        found.append(Comparison(layouts=layouts, differs=differs, rows="run"))
    return found


def run_names(records: Sequence[Record]) -> list[str]:
    """The first words that tell the runs' folders apart; empty for the only run."""
    words = [tuple(Path(r.run_dir).name.split("-")) for r in records]
    different = set(words)
    if len(different) == 1:
        return ["" if len(words) == 1 else "-".join(name) for name in words]
    sizes = range(max(map(len, words)) + 1)
    told = [len({name[:size] for name in words}) for size in sizes]  # names, by so many words
    first = told.count(1) - 1
    last = told.index(len(different))
    return ["-".join(name[first:last]) for name in words]


def results(comparison: Comparison) -> Table:
    """How fast, how good; every layout has a row, those that failed, too."""
    layouts = comparison.layouts
    columns = {comparison.rows: [layout.name for layout in layouts]}
    for name, number in MEASURED.items():
        columns[name] = [number(*layout.done) for layout in layouts]
    columns["runs"] = [
        f"{len(layout.records)} of {layout.num_runs}" if layout.num_runs > 1 else NOTHING
        for layout in layouts
    ]
    columns["status"] = [layout.ended for layout in layouts]
    about = "Median step of each run"
    if any(len(layout.records) > 1 for layout in layouts):
        about += "; mean ± standard deviation over the seeds"
    if not any(r.machine["gpu_name"] for r in comparison.records):
        about += "; peak RAM: the fullest process, tensors and libraries"
    return _table("Results", f"{about}.", columns)


def predictions(comparison: Comparison) -> Table:
    """What the plan said before each run."""
    records = comparison.records
    on_gpu = any(r.machine["gpu_name"] for r in records)
    what = (
        "what tensors hold on the fullest GPU"
        if on_gpu
        else "the RAM of the fullest process, tensors and libraries"
    )
    about = f"Memory is {what}. Each prediction was made before its run"
    layouts = comparison.finished if any(r.prediction for r in records) else []
    columns = {comparison.rows: [layout.name for layout in layouts]}
    for name, (heading, found, said) in PREDICTED.items():
        columns[f"{heading} measured"] = [found(*layout.done) for layout in layouts]
        columns[f"{heading} predicted"] = [said(*layout.done) for layout in layouts]
        off = [_error(said, found, layout.done) for layout in layouts]
        columns[f"{heading} off"] = [NOTHING if e is None else f"{e:+.0%}" for e in off]
        each = [_error(said, found, [r]) for r in records]
        if errors := [abs(error) for error in each if error is not None]:
            near = sum(error <= 0.10 for error in errors)
            median = statistics.median(errors)
            about += f"; {name}: {near} of {len(errors)} within 10%, median {median:.0%} off"
    bounds = [{r.prediction["bound_by"] for r in layout.done if r.prediction} for layout in layouts]
    columns["mostly"] = [", ".join(sorted(each - {None})) or NOTHING for each in bounds]
    return _table("Prediction and measurement", f"{about}.", columns)


def _error(said: Number, found: Number, records: Sequence[Record]) -> float | None:
    """Mean prediction by mean measurement, less one; None where one of them is missing."""
    expected = said.values(records)
    measured = found.values(records)
    if not expected or not measured:
        return None
    return statistics.fmean(expected) / statistics.fmean(measured) - 1


def _memory(r: Record) -> dict[str, float]:
    prediction = r.prediction or {}
    parts = dict(prediction.get("memory_bytes", {}))
    if parts and not r.machine["gpu_name"]:  # with what Python and the libraries take
        parts["Python"] = prediction["host_bytes"] - sum(parts.values())
    return parts


def _sent(r: Record) -> dict[str, float]:
    sent = (r.prediction or {}).get("sent_bytes", {})
    return {f"over {axis}": size for axis, size in sent.items()}


def _parts(
    title: str, about: str, comparison: Comparison, parts: Callable[[Record], dict[str, float]]
) -> Table:
    """A row a layout, a column a part (in bytes), and the sum."""
    columns = {comparison.rows: [layout.name for layout in comparison.finished]}
    sizes = [parts(layout.done[0]) for layout in comparison.finished]
    names = dict.fromkeys(name for each in sizes for name in each)
    for each in sizes:
        each["in all"] = sum(each.values())
    for name in (*names, "in all"):
        columns[name] = [gib(size) if (size := each.get(name)) else NOTHING for each in sizes]
    return _table(title, about, columns)


def _table(title: str, about: str, columns: dict[str, list[str]]) -> Table:
    """Without the columns that say nothing."""
    kept = {name: cells for name, cells in columns.items() if {*cells} - {NOTHING}}
    return Table(title=title, about=about, columns=kept)
