"""Run records -> comparison tables. Every figure shown anywhere is made into text here."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from distributed_training.display import gib

Record = dict[str, Any]

# Column -> text from a record. GPU memory is what PyTorch's allocator reserved: "allocated" leaves
# out the buffers of CUDA graphs.
COLUMNS: dict[str, Callable[[Record], str]] = {
    "strategy": lambda r: " ".join([r["strategy"]["name"], *layout_words(r)]),
    "processes": lambda r: str(r["world_size"]),
    "batch": lambda r: f"{r['batch']['micro_batch_size']} x {r['config']['max_length']}",
    "precision": lambda r: r["config"]["precision"],
    "compile": lambda r: "yes" if r["config"]["compile"] else "no",
    "tokens/s": lambda r: _number(r["performance"].get("tokens_per_s"), "{:,.0f}"),
    "ms a step": lambda r: _number(
        r["performance"].get("step_time_s", {}).get("p50"), "{:,.1f}", scale=1000
    ),
    "timed steps": lambda r: str(r["performance"].get("num_timed_steps", 0)),
    "MFU": lambda r: _number(r["performance"].get("mfu"), "{:.1f}%", scale=100),
    "peak GPU memory": lambda r: gib(r["memory"]["peak_reserved_bytes"]),
    "GPU memory by rank": lambda r: _by_rank(r["memory"]["by_rank"]),
    "peak host memory": lambda r: gib(r["memory"]["peak_host_bytes"]),
    "bubble": lambda r: _bubble(r, r.get("bubble"), "idle_share", "not measured"),
    "ideal bubble": lambda r: _bubble(r, r.get("pipeline"), "ideal_bubble", "no formula"),
    "disk a step": lambda r: _disk(r),
    "loss": lambda r: _last([loss for _, loss in r["loss_curve"]], "{:.3f}"),
    "perplexity": lambda r: _last([entry["perplexity"] for entry in r["evaluations"]], "{:.1f}"),
    "steps": lambda r: f"{r['step']} of {r['num_steps']}",
    "status": lambda r: r["status"],
}
DEFAULT_COLUMNS = (
    "strategy", "processes", "batch", "tokens/s", "ms a step", "MFU", "peak GPU memory",
    "peak host memory", "loss", "perplexity", "status",
)  # fmt: skip


def layout_words(record: Record) -> list[str]:
    """What tells two runs of one strategy apart: axes and, with a pipeline, schedule and
    micro-batches. Nothing where the strategy's name says it all."""
    axes = record.get("topology", {})
    both = axes.get("dp_replicate", 1) > 1 and axes.get("dp_shard", 1) > 1
    if not both and axes.get("tp", 1) == axes.get("pp", 1) == 1:
        return []
    words = [f"{axis}{size}" for axis, size in axes.items() if size > 1]
    pipeline, config = record.get("pipeline"), record["config"]
    if axes.get("tp", 1) > 1 and not config.get("sequence_parallel", True):
        words.append("whole-norms")
    if config.get("pipeline_cut"):
        words.append("cut-" + "-".join(config["pipeline_cut"].replace(" ", "").split(",")))
    return words + ([f"{pipeline['schedule']}-m{pipeline['num_microbatches']}"] if pipeline else [])


def _number(value: float | None, form: str, scale: float = 1.0) -> str:
    return "not measured" if value is None else form.format(scale * value)


def _bubble(record: Record, entry: Record | None, key: str, without: str) -> str:
    """A share of idle time; only pipelines have one."""
    if not record.get("pipeline"):
        return "-"
    share = (entry or {}).get(key)
    return without if share is None else f"{100 * share:.1f}%"


def _by_rank(ranks: Sequence[Record]) -> str:
    """Peaks in GiB; results/compare_layouts.py says what of them is from earlier runs."""
    peaks = [(rank["peak_reserved_bytes"], rank.get("left_over_bytes", 0)) for rank in ranks]
    if any(peak is None for peak, _ in peaks):
        return "not measured"
    return " / ".join(f"{(peak - left) / 2**30:.1f}" for peak, left in peaks) + " GiB"


def _last(values: Sequence[float | None], form: str) -> str:
    """The last of what was measured at several steps; null there is what was not finite."""
    if not values:
        return "not measured"
    return "nan" if values[-1] is None else form.format(values[-1])


def _disk(record: Record) -> str:
    """Bytes a step of the whole training phase; what would round to 0.0 GB is logging, and the
    first reading of libraries."""
    disk = record.get("disk")
    if disk is None:
        return "not measured"
    if max(disk["read_bytes"], disk["write_bytes"]) / disk["num_steps"] < 5e7:
        return "none"
    read, written = (disk[key] / disk["num_steps"] / 1e9 for key in ("read_bytes", "write_bytes"))
    return f"{read:.1f} GB read, {written:.1f} GB written"


def table(records: Sequence[Record], columns: Sequence[str] = DEFAULT_COLUMNS) -> str:
    """A Markdown table, one row a record. A run that did not finish shows its status instead of
    figures it does not have.
    """
    rows = [[_cell(record, column) for column in columns] for record in records]
    widths = [max(len(text) for text in cells) for cells in zip(columns, *rows, strict=True)]
    lines = [
        "| "
        + " | ".join(text.ljust(width) for text, width in zip(cells, widths, strict=True))
        + " |"
        for cells in [list(columns), ["-" * width for width in widths], *rows]
    ]
    return "\n".join(lines)


def _cell(record: Record, column: str) -> str:
    if "performance" not in record and column not in (
        "strategy", "processes", "batch", "precision", "compile", "status", "steps",
    ):  # fmt: skip
        return "-"
    return COLUMNS[column](record)


def group_by_work(records: Sequence[Record]) -> list[list[Record]]:
    """Records that did the same work together, groups in order of first appearance."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(json.dumps(record["work"], sort_keys=True), []).append(record)
    return list(groups.values())


def differing_keys(groups: Sequence[Sequence[Record]]) -> list[str]:
    """The keys of the work in which groups differ, or that not all of them have."""
    works = [group[0]["work"] for group in groups]
    return [
        key
        for key in dict.fromkeys(key for work in works for key in work)
        if len({json.dumps(work[key], sort_keys=True) if key in work else "" for work in works}) > 1
    ]


def comparison(records: Sequence[Record]) -> str:
    """One table for each kind of work; where there are several, each says how it differs."""
    groups = group_by_work(records)
    if len(groups) == 1:
        return table(records)
    keys = differing_keys(groups)
    parts = [
        f"These runs did {len(groups)} kinds of work; only rows of one table can be compared. "
        f"They differ in: {', '.join(keys)}."
    ]
    for group in groups:
        work = group[0]["work"]
        parts.append(", ".join(f"{key}={work.get(key)}" for key in keys))
        parts.append(table(group))
    return "\n\n".join(parts)
