"""Define the columns of the tables in the documents, by heading."""

from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from distributed_training.records.record import Record
from distributed_training.records.results import EMPTY_CELL, RESULTS, SETTINGS, Column

MARKDOWN: dict[str, Any] = {"tablefmt": "github", "disable_numparse": True}
DEFAULT = (
    "strategy", "processes", "batch", "tokens/s", "ms per step", "MFU", "reserved GPU memory",
    "peak RAM", "training loss", "validation perplexity", "status",
)  # fmt: skip


def read_extra(r: Record, name: str) -> Any:
    """Return an entry that programs of the lab add to a record, or None if it is missing."""
    return (r.model_extra or {}).get(name)


def _disk(r: Record) -> str | None:
    """Return the number of GB read and written per step. Amounts below 0.05 GB come from logging
    and from loading libraries, and are shown as "none"."""
    disk = read_extra(r, "disk")
    if disk is None:
        return None
    steps = disk["num_steps"]
    read = disk["read_bytes"] / steps / 1e9
    written = disk["write_bytes"] / steps / 1e9
    if max(read, written) < 0.05:
        return "none"
    return f"{read:.1f} GB read, {written:.1f} GB written"


# Columns that a run has before its first step
_START = {
    **SETTINGS,
    "strategy": Column(lambda r: r.layout_name),
    "CUDA graph": Column(lambda r: "yes" if r.config.get("cuda_graphs") else "no"),
    "compression": Column(
        lambda r: (
            r.engine_options.get("compression") or r.config.get("gradient_compression", "none")
        )
    ),
    "trains": Column(
        lambda r: f"LoRA {rank}" if (rank := r.config.get("lora_rank")) else "weights"
    ),
    "recomputes": Column(lambda r: r.config["activation_checkpointing"]),
    "loss chunk": Column(lambda r: str(r.config.get("loss_chunk_tokens") or EMPTY_CELL)),
    "steps": Column(lambda r: f"{r.step} of {r.num_steps}"),
    "status": Column(lambda r: r.status),
}
COLUMNS = {
    **_START,
    **RESULTS,
    "bubble": Column(
        lambda r: r.pipeline and (read_extra(r, "bubble") or {}).get("idle_share"), "{:.1%}".format
    ),
    "ideal bubble": Column(lambda r: (r.pipeline or {}).get("ideal_bubble"), "{:.1%}".format),
    "disk per step": Column(_disk),
}


def table(records: Sequence[Record], columns: Sequence[str] = DEFAULT) -> str:
    """Return a Markdown table with one row per record. If a run has no results, its measured
    columns are empty."""
    rows = [
        [COLUMNS[name](r) if r.performance or name in _START else EMPTY_CELL for name in columns]
        for r in records
    ]
    return tabulate(rows, columns, **MARKDOWN)
