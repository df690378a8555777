"""Run records -> comparison tables and plots, and documents that cannot drift from them.

    python -m distributed_training.report runs/*                    table, plots in report/
    python -m distributed_training.report --write TRAINING_RESULTS.md README.md
    python -m distributed_training.report --check TRAINING_RESULTS.md README.md

A document holds generated parts between two comment lines:

    <!-- table: h200-x1 -->
    ...
    <!-- end -->

`--write` fills them from results/records/ and `--check` fails when a part differs from what
`--write` would put there.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from distributed_training.display import gib
from distributed_training.errors import UserError
from distributed_training.record import RECORD_FILE, load_record
from distributed_training.strategy import ROOT, list_strategies

RECORDS_DIR = ROOT / "results" / "records"
Record = dict[str, Any]

# Column -> text from a record. Everything shown anywhere comes through here. GPU memory is what
# PyTorch's allocator reserved: "allocated" leaves out the buffers of CUDA graphs.
COLUMNS: dict[str, Callable[[Record], str]] = {
    "strategy": lambda r: r["strategy"]["name"],
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
    "peak host memory": lambda r: gib(r["memory"]["peak_host_bytes"]),
    "disk a step": lambda r: _disk(r),
    "loss": lambda r: f"{r['loss_curve'][-1][1]:.3f}" if r["loss_curve"] else "not measured",
    "perplexity": lambda r: (
        f"{r['evaluations'][-1]['perplexity']:.1f}" if r["evaluations"] else "not measured"
    ),
    "steps": lambda r: f"{r['step']} of {r['num_steps']}",
    "status": lambda r: r["status"],
}
DEFAULT_COLUMNS = (
    "strategy", "processes", "batch", "tokens/s", "ms a step", "MFU", "peak GPU memory",
    "peak host memory", "loss", "perplexity", "status",
)  # fmt: skip


def _number(value: float | None, form: str, scale: float = 1.0) -> str:
    return "not measured" if value is None else form.format(scale * value)


def _disk(record: Record) -> str:
    """Bytes a step of the whole training phase; below 10 MB a step it is only logging."""
    disk = record.get("disk")
    if disk is None:
        return "not measured"
    if max(disk["read_bytes"], disk["write_bytes"]) / disk["num_steps"] < 1e7:
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
    """The keys of the work in which groups differ."""
    works = [group[0]["work"] for group in groups]
    return [key for key in works[0] if len({json.dumps(work.get(key)) for work in works}) > 1]


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


def load_records(paths: Sequence[Path]) -> list[Record]:
    """Records of run folders or files. Folders without one (a run that failed before its first
    step, another folder under runs/) are named on stderr and left out.
    """
    found = []
    for path in paths:
        if path.is_dir() and not (path / RECORD_FILE).is_file():
            print(f"note: {path} holds no {RECORD_FILE}; left out", file=sys.stderr)
        else:
            found.append(load_record(path))
    return found


def published(name: str) -> list[Record]:
    """The records of one published measurement, results/records/<name>/*.json, by strategy."""
    folder = RECORDS_DIR / name
    order = list(list_strategies())
    records = load_records(sorted(folder.glob("*.json")))
    if not records:
        raise UserError(f"{folder} holds no records", fix=f"see {RECORDS_DIR}")
    return sorted(
        records,
        key=lambda r: (
            r["num_parameters"],
            r["batch"]["micro_batch_size"],
            order.index(r["strategy"]["name"]) if r["strategy"]["name"] in order else len(order),
            r["config"]["precision"],
        ),
    )


_PART = re.compile(
    r"(<!-- table: (?P<name>[\w./-]+)(?P<options>[^>]*)-->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL
)
_OPTION = re.compile(r'(\w+)="([^"]*)"')


def render(text: str) -> str:
    """`text` with every generated part filled from the published records.

    Options: columns="strategy, tokens/s" and where="model=gpt2-medium, batch_size=4".
    """

    def fill(match: re.Match[str]) -> str:
        options = dict(_OPTION.findall(match["options"]))
        records = published(match["name"])
        for condition in filter(None, options.get("where", "").split(",")):
            key, _, value = condition.strip().partition("=")
            records = [record for record in records if str(record["config"][key]) == value]
        if not records:
            raise UserError(f"no record of {match['name']} matches {options['where']!r}")
        columns = [name.strip() for name in options.get("columns", "").split(",") if name.strip()]
        return match[1] + "\n" + table(records, columns or DEFAULT_COLUMNS) + "\n\n" + match[5]

    return _PART.sub(fill, text)


def check_documents(paths: Sequence[Path]) -> list[str]:
    """Names of documents whose generated parts differ from their records."""
    return [str(path) for path in paths if render(path.read_text()) != path.read_text()]


def draw_plots(records: Sequence[Record], folder: Path) -> list[Path]:
    """loss.png, throughput.png and memory.png of records with results; the paths written."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    done = [record for record in records if record.get("performance", {}).get("tokens_per_s")]
    if not done:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    labels = [_label(record, done) for record in done]
    height = 1.2 + 0.34 * len(done)
    written = []

    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    styles = ["-", "--", "-.", ":"]
    for index, (record, label) in enumerate(zip(done, labels, strict=True)):
        steps, losses = zip(*record["loss_curve"], strict=True)
        axes.plot(steps, losses, styles[index % 4], label=label, linewidth=1.4)
    axes.set(xlabel="optimizer step", ylabel="training loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=2)
    written.append(_save(figure, folder / "loss.png"))

    figure, axes = plt.subplots(figsize=(8, height), layout="constrained")
    speeds = [record["performance"]["tokens_per_s"] for record in done]
    bars = axes.barh(labels, speeds, color="#0072b2")
    axes.bar_label(bars, [f"{speed:,.0f}" for speed in speeds], padding=3, fontsize=8)
    axes.set(xlabel="tokens per second, all processes (median step)", xlim=(0, 1.15 * max(speeds)))
    axes.invert_yaxis()
    written.append(_save(figure, folder / "throughput.png"))

    figure, axes = plt.subplots(figsize=(8, height), layout="constrained")
    on_gpu = done[0]["memory"]["peak_reserved_bytes"] is not None
    key = "peak_reserved_bytes" if on_gpu else "peak_host_bytes"
    sizes = [(record["memory"][key] or 0) / 2**30 for record in done]
    bars = axes.barh(labels, sizes, color="#d55e00")
    axes.bar_label(bars, [f"{size:.1f}" for size in sizes], padding=3, fontsize=8)
    what = "GPU memory taken by PyTorch" if on_gpu else "host memory"
    axes.set(xlabel=f"peak {what}, GiB, highest rank", xlim=(0, 1.15 * max(sizes)))
    axes.invert_yaxis()
    written.append(_save(figure, folder / "memory.png"))
    return written


def _label(record: Record, records: Sequence[Record]) -> str:
    """Strategy, with whatever else distinguishes the records."""
    parts = [record["strategy"]["name"]]
    for text in (
        lambda r: r["config"]["model"],
        lambda r: f"{r['batch']['micro_batch_size']} x {r['config']['max_length']}",
        lambda r: r["config"]["precision"],
        lambda r: f"{r['world_size']} proc.",
    ):
        if len({text(other) for other in records}) > 1:
            parts.append(text(record))
    return ", ".join(parts)


def _save(figure: Any, path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description="Tables and plots from run records.", allow_abbrev=False
    )
    parser.add_argument("paths", nargs="*", type=Path, help="run folders, records or documents")
    parser.add_argument("--write", action="store_true", help="fill generated parts of documents")
    parser.add_argument("--check", action="store_true", help="fail when documents are out of date")
    parser.add_argument("--plots", type=Path, default=Path("report"), help="folder for the plots")
    arguments = parser.parse_args(argv)
    try:
        if not arguments.paths:
            raise UserError(
                "no paths given", fix="try: python -m distributed_training.report runs/*"
            )
        if arguments.check:
            return _check(arguments.paths)
        if arguments.write:
            for path in arguments.paths:
                path.write_text(render(path.read_text()))
            return 0
        records = load_records(arguments.paths)
        if not records:
            raise UserError("no run record in these paths", fix="give folders under runs/")
        print(comparison(records))
        for path in draw_plots(records, arguments.plots):
            print(f"wrote {path}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _check(paths: Sequence[Path]) -> int:
    stale = check_documents(paths)
    for path in stale:
        print(
            f"error: {path} differs from results/records; "
            f"run: python -m distributed_training.report --write {path}",
            file=sys.stderr,
        )
    return int(bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
