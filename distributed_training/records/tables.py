"""What a table can say of runs, by heading. Every number in a table becomes text here."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distributed_training.records.display import NOT_MEASURED, gib, last_part
from distributed_training.records.record import Record

Value = Callable[[Record], float | None]
MARKDOWN: dict[str, Any] = {"tablefmt": "github", "disable_numparse": True}


@dataclass(frozen=True)
class Number:
    """A number of each run: in a table, one run's or the mean over several."""

    value: Value
    show: Callable[[float], str]
    missing: str = NOT_MEASURED
    spread: bool = False  # with the standard deviation, where there are several

    def mean(self, records: Sequence[Record]) -> float | None:
        """Over the runs that have it."""
        found = self._found(records)
        return statistics.fmean(found) if found else None

    def __call__(self, *records: Record) -> str:
        found = self._found(records)
        if not found:
            return self.missing
        text = self.show(statistics.fmean(found))
        if self.spread and len(found) > 1:
            text += f" ± {self.show(statistics.stdev(found))}"
        return text

    def _found(self, records: Sequence[Record]) -> list[float]:
        return [value for r in records if (value := self.value(r)) is not None]


def tokens_per_s(r: Record) -> float | None:
    return r.performance.get("tokens_per_s")


def step_s(r: Record) -> float | None:
    """Of the median step."""
    return r.performance.get("step_time_s", {}).get("p50")


def measured_peak(r: Record) -> float | None:
    """Bytes that tensors hold on the fullest GPU, else the RAM of the fullest process."""
    on_gpu = r.memory.get("peak_allocated_bytes")
    return r.memory.get("peak_host_bytes") if on_gpu is None else on_gpu


def predicted_peak(r: Record) -> float | None:
    """What `measured_peak` is to be."""
    return predicted("peak_bytes" if r.machine["gpu_name"] else "host_bytes")(r)


def predicted(name: str) -> Value:
    """An entry of the record's prediction."""
    return lambda r: (r.prediction or {}).get(name)


def trained(name: str) -> Value:
    """An entry of the last evaluation; None where there was none since training began."""

    def value(r: Record) -> float | None:
        last = r.evaluations[-1] if r.evaluations else {"step": 0}
        return finite(last[name]) if last["step"] else None

    return value


validation_loss = trained("loss")


def finite(value: float | None) -> float:
    """What was not finite is None in a record."""
    return float("nan") if value is None else value


def layout_words(record: Record) -> list[str]:
    """What tells two runs of one strategy apart: axes and, with a pipeline, schedule and
    micro-batches. Empty where the strategy's name says it all."""
    axes = record.mesh
    config = record.config
    both = axes["dp_replicate"] > 1 and axes["dp_shard"] > 1
    if not both and axes["tp"] == axes["pp"] == 1:
        return []
    words = [f"{axis}{size}" for axis, size in axes.items() if size > 1]
    if axes["tp"] > 1 and not config.get("sequence_parallel", True):
        words.append("whole-norms")
    if cut := config.get("pipeline_cut"):
        words.append("cut-" + cut.replace(" ", "").replace(",", "-"))
    if pipeline := record.pipeline:
        words.append("{schedule}-m{num_microbatches}".format(**pipeline))
    return words


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}"


# What tells the settings of runs apart, besides the strategy.
SETTINGS: dict[str, Callable[..., str]] = {
    "model": lambda r: r.config["model"],
    "processes": lambda r: str(r.world_size),
    "batch": lambda r: f"{r.batch.micro_batch_size} x {r.config['max_length']}",
    "precision": lambda r: r.config["precision"],
    "compile": lambda r: {False: "no", True: "yes"}.get(r.config["compile"], r.config["compile"]),
    "dataset": lambda r: last_part(r.config["dataset"]),
}
MS_A_STEP = Number(step_s, _milliseconds, spread=True)
MS_PREDICTED = Number(predicted("step_time_s"), _milliseconds, "-")
# What was measured. GPU memory is what PyTorch's allocator reserved: "allocated" leaves out the
# buffers of CUDA graphs.
COLUMNS: Mapping[str, Callable[..., str]] = {
    **SETTINGS,
    "strategy": lambda r: " ".join([r.strategy["name"], *layout_words(r)]),
    "tokens/s": Number(tokens_per_s, "{:,.0f}".format, spread=True),
    "ms a step": MS_A_STEP,
    "MFU": Number(lambda r: r.performance.get("mfu"), "{:.1%}".format),
    "peak GPU memory": Number(lambda r: r.memory.get("peak_reserved_bytes"), gib),
    "peak host memory": Number(lambda r: r.memory.get("peak_host_bytes"), gib),
    "training loss": Number(
        lambda r: finite(r.loss_curve[-1][1]) if r.loss_curve else None,
        "{:.3f}".format,
        spread=True,
    ),
    "validation loss": Number(validation_loss, "{:.4f}".format, spread=True),
    "validation perplexity": Number(trained("perplexity"), "{:.1f}".format, spread=True),
}
