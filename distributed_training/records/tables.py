"""Run records -> comparison tables. Every number in a table becomes text here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tabulate import tabulate

from distributed_training.records.display import NOT_MEASURED, gib
from distributed_training.records.record import Record

PERCENT = "{:.1f}%"
MARKDOWN: dict[str, Any] = {"tablefmt": "github", "disable_numparse": True}
# What is known of a run before its first step.
_START: dict[str, Callable[[Record], str]] = {
    "strategy": lambda r: " ".join([r.strategy["name"], *layout_words(r)]),
    "model": lambda r: r.config["model"],
    "processes": lambda r: str(r.world_size),
    "batch": lambda r: f"{r.batch.micro_batch_size} x {r.config['max_length']}",
    "precision": lambda r: r.config["precision"],
    "compile": lambda r: {False: "no", True: "yes"}.get(r.config["compile"], r.config["compile"]),
    "CUDA graph": lambda r: "yes" if r.config.get("cuda_graphs") else "no",
    "compression": lambda r: r.config.get("gradient_compression", "none"),
    "steps": lambda r: f"{r.step} of {r.num_steps}",
    "status": lambda r: r.status,
}
# What was measured. GPU memory is what PyTorch's allocator reserved: "allocated" leaves out the
# buffers of CUDA graphs.
_RESULTS: dict[str, Callable[[Record], str]] = {
    "tokens/s": lambda r: _number(r.performance.get("tokens_per_s"), "{:,.0f}"),
    "ms a step": lambda r: _number(
        r.performance.get("step_time_s", {}).get("p50"), "{:,.1f}", 1000
    ),
    "timed steps": lambda r: str(r.performance["num_timed_steps"]),
    "MFU": lambda r: _number(r.performance.get("mfu"), PERCENT, 100),
    "peak GPU memory": lambda r: gib(r.memory.get("peak_reserved_bytes")),
    "GPU memory by rank": lambda r: _by_rank(r.memory.get("by_rank", [])),
    "peak host memory": lambda r: gib(r.memory.get("peak_host_bytes")),
    "bubble": lambda r: _idle(r, (r.bubble or {}).get("idle_share")),
    "formula + operations + messages + gaps": lambda r: _parts(r),
    "ideal bubble": lambda r: _idle(r, (r.pipeline or {}).get("ideal_bubble"), "no formula"),
    "disk a step": lambda r: _disk(r.disk),
    "ms predicted": lambda r: _number(_predicted(r, "step_time_s"), "{:,.1f}", 1000, "-"),
    "GiB predicted": lambda r: _number(_predicted(r, "peak_bytes"), "{:,.2f}", 1 / 2**30, "-"),
    "loss": lambda r: _last([loss for _, loss in r.loss_curve], "{:.3f}"),
    "perplexity": lambda r: _last([entry["perplexity"] for entry in r.evaluations], "{:.1f}"),
}
COLUMNS = {**_START, **_RESULTS}
DEFAULT = (
    "strategy", "processes", "batch", "tokens/s", "ms a step", "MFU", "peak GPU memory",
    "peak host memory", "loss", "perplexity", "status",
)  # fmt: skip


def layout_words(record: Record) -> list[str]:
    """What tells two runs of one strategy apart: axes and, with a pipeline, schedule and
    micro-batches. Empty where the strategy's name says it all."""
    axes, config = record.mesh, record.config
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


def _number(value: float | None, form: str, scale: float = 1.0, missing: str = NOT_MEASURED) -> str:
    return missing if value is None else form.format(scale * value)


def _idle(record: Record, share: float | None, missing: str = NOT_MEASURED) -> str:
    """A share of idle time; only pipelines have one."""
    return _number(share, PERCENT, 100, missing) if record.pipeline else "-"


def _parts(record: Record) -> str:
    """Where a bubble comes from, in points (results/lab/analysis/bubble.py)."""
    if not record.pipeline:
        return "-"
    parts = (record.bubble or {}).get("parts")
    return (
        NOT_MEASURED if parts is None else " ".join(f"{100 * part:+.1f}" for part in parts.values())
    )


def _predicted(record: Record, name: str) -> float | None:
    """What was said before the run."""
    return None if record.prediction is None else record.prediction[name]


def _by_rank(ranks: Sequence[dict[str, Any]]) -> str:
    """Peaks in GiB without what earlier runs of the process left (results/lab/layouts.py)."""
    pairs = [(rank["peak_reserved_bytes"], rank.get("left_over_bytes", 0)) for rank in ranks]
    peaks = [f"{(peak - left) / 2**30:.1f}" for peak, left in pairs if peak is not None]
    return ", ".join(peaks) + " GiB" if peaks else NOT_MEASURED


def _last(values: Sequence[float | None], form: str) -> str:
    """None among the values was not finite."""
    return _number(values[-1], form, missing="nan") if values else NOT_MEASURED


def _disk(disk: dict[str, int] | None) -> str:
    """Bytes per step. What would round to 0.0 GB is logging and the loading of libraries."""
    if disk is None:
        return NOT_MEASURED
    read, written = (disk[name] / disk["num_steps"] / 1e9 for name in ("read_bytes", "write_bytes"))
    return "none" if max(read, written) < 0.05 else f"{read:.1f} GB read, {written:.1f} GB written"


def markdown_table(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    """A table for a document, with the blank lines that Markdown needs around it."""
    return f"\n{tabulate(rows, headers, **MARKDOWN)}\n"


def table(records: Sequence[Record], columns: Sequence[str] = DEFAULT) -> str:
    """A Markdown table, one row per record; a run without results shows "-" for them."""
    rows = [
        [COLUMNS[name](r) if r.performance or name in _START else "-" for name in columns]
        for r in records
    ]
    return tabulate(rows, columns, **MARKDOWN)
