"""Define the columns of the tables in the documents, by heading."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tabulate import tabulate

from distributed_training.records import tables
from distributed_training.records.record import Record
from distributed_training.records.tables import SETTINGS, NumberColumn, predicted
from distributed_training.settings.machine import GIB

NOT_MEASURED = "not measured"
MARKDOWN: dict[str, Any] = {"tablefmt": "github", "disable_numparse": True}
DEFAULT = (
    "strategy", "processes", "batch", "tokens/s", "ms per step", "MFU", "peak GPU memory",
    "peak RAM", "training loss", "validation perplexity", "status",
)  # fmt: skip


def _pipelines_only(number: NumberColumn) -> Callable[..., str]:
    """Return a column that shows the number for pipelines and "-" for other runs."""
    return lambda *records: number(*records) if records[0].pipeline else "-"


def _bubble_parts(record: Record) -> str:
    """Return the parts of a run's bubble in percentage points (results/lab/analysis/bubble.py)."""
    if not record.pipeline:
        return "-"
    parts = (record.bubble or {}).get("parts")
    if parts is None:
        return NOT_MEASURED
    return " ".join(f"{100 * part:+.1f}" for part in parts.values())


def _by_rank(r: Record) -> str:
    """Return each rank's peak GPU memory in GiB, without memory left over from earlier runs in the
    same process (results/lab/layouts.py)."""
    peaks = [
        f"{(rank['peak_reserved_bytes'] - rank.get('left_over_bytes', 0)) / GIB:.1f}"
        for rank in r.memory.get("by_rank", [])
        if rank["peak_reserved_bytes"] is not None
    ]
    return ", ".join(peaks) + " GiB" if peaks else NOT_MEASURED


def _disk(r: Record) -> str:
    """Return the number of GB read and written per step. Amounts below 0.05 GB come from logging
    and from loading libraries, and are shown as "none"."""
    if r.disk is None:
        return NOT_MEASURED
    steps = r.disk["num_steps"]
    read = r.disk["read_bytes"] / steps / 1e9
    written = r.disk["write_bytes"] / steps / 1e9
    if max(read, written) < 0.05:
        return "none"
    return f"{read:.1f} GB read, {written:.1f} GB written"


# Columns that a run has before its first step
_START: dict[str, Callable[..., str]] = {
    **SETTINGS,
    "strategy": lambda r: r.layout_name,
    "CUDA graph": lambda r: "yes" if r.config.get("cuda_graphs") else "no",
    "compression": lambda r: (
        r.engine_options.get("compression") or r.config.get("gradient_compression", "none")
    ),
    "trains": lambda r: f"LoRA {rank}" if (rank := r.config.get("lora_rank")) else "weights",
    "recomputes": lambda r: r.config["activation_checkpointing"],
    "loss chunk": lambda r: str(r.config.get("loss_chunk_tokens") or "-"),
    "steps": lambda r: f"{r.step} of {r.num_steps}",
    "status": lambda r: r.status,
}
COLUMNS: Mapping[str, Callable[..., str]] = {
    **_START,
    **{name: replace(number, missing=NOT_MEASURED) for name, number in tables.MEASURED.items()},
    "timed steps": lambda r: str(r.performance["num_timed_steps"]),
    "GPU memory by rank": _by_rank,
    "formula + operations + messages + gaps": _bubble_parts,
    "bubble": _pipelines_only(
        NumberColumn(lambda r: (r.bubble or {}).get("idle_share"), "{:.1%}".format, NOT_MEASURED)
    ),
    "ideal bubble": _pipelines_only(
        NumberColumn(
            lambda r: (r.pipeline or {}).get("ideal_bubble"), "{:.1%}".format, "no formula"
        )
    ),
    "disk per step": _disk,
    "ms predicted": tables.PREDICTED_STEP_MS,
    "GiB predicted": NumberColumn(predicted("peak_bytes"), lambda size: f"{size / GIB:,.2f}", "-"),
}


def table(records: Sequence[Record], columns: Sequence[str] = DEFAULT) -> str:
    """Return a Markdown table with one row per record. If a run has no results, its measured
    columns contain "-"."""
    rows = [
        [COLUMNS[name](r) if r.performance or name in _START else "-" for name in columns]
        for r in records
    ]
    return tabulate(rows, columns, **MARKDOWN)
