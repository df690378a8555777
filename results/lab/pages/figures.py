"""Draw the figures in TRAINING_RESULTS.md and README.md from published records.

results/lab/documents.py redraws the figures or compares them with the existing files."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from distributed_training.records.record import Record, load_record
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import load_json
from distributed_training.settings.machine import GIB
from results.lab.pages import bugs, validate
from results.lab.pages.columns import read_extra
from results.lab.pages.timelines import draw as draw_timelines

# Okabe and Ito's colors for each kind of split. Color-blind readers can distinguish them.
COLORS = {
    "nothing": "#000000", "state": "#0072b2", "layers": "#009e73", "each layer": "#d55e00",
    "layers and more": "#cc79a7",
}  # fmt: skip
SCHEDULES = {
    "1f1b": "#0072b2", "interleaved": "#009e73", "zb-h1": "#e69f00", "zb-v": "#d55e00",
}  # fmt: skip
MEDIUM = "gpt2-medium, 4 H200s, 256 x 1,024 tokens per step"


def render(draw: Callable[[Path], Figure], records: Path) -> str:
    """Return a figure as an SVG string. Equal records give equal strings."""
    file = io.StringIO()
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    style: Any = {"svg.hashsalt": draw.__name__, "svg.fonttype": "none", "font.size": 10}
    with rc_context({**style, "font.family": "sans-serif", "axes.axisbelow": True}):
        figure = draw(records)
        # Round the positions, because the layout solver is exact only to a few digits.
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        for axes in figure.axes:
            left, bottom, width, height = (round(edge, 4) for edge in axes.get_position().bounds)
            axes.set_position((left, bottom, width, height))
        figure.savefig(file, format="svg", metadata=metadata)
    return file.getvalue()


def tradeoff(records: Path) -> Figure:
    """For each layout, plot tokens per second against the peak memory of the fullest GPU in GiB."""
    chosen = {
        "dp": (8, -3), "zero1": (-22, 9), "zero2": (8, -12), "zero3": (8, -8), "fsdp": (-30, -6),
        "tp tp4": (-118, -16), "3d dp_shard2 tp2": (-40, -16), "3d pp2 tp2 1f1b-m8": (8, -6),
        "3d pp2 tp2 zb-v-m8": (8, -3), "hybrid pp2 dp_shard2 1f1b-m8": (8, -7),
        "pp pp4 1f1b-m8": (8, -8), "pp pp4 zb-h1-m8": (-68, -4), "pp pp4 interleaved-m8": (8, -3),
        "pp pp4 zb-v-m8": (8, -6), "pp pp4 zb-v-m16": (-62, -12),
    }  # fmt: skip
    figure, axes = _figure("If the state fits, dp is fastest; pipelines need the least memory", 4.4)
    axes.set_title(f"{MEDIUM}; pipelines on another machine", fontsize=9, loc="left")
    best = _gpt2_medium_records(records)
    for name, shift in chosen.items():
        record = best[name]
        point = (_peak_bytes(record) / GIB, _speed(record))
        axes.plot(*point, "o", color=COLORS[_split_kind(record)], markersize=7)
        label = name.removeprefix("3d ").replace("pp pp4", "pp4")
        label = label.replace("tp tp4", "tp4: all 256 samples in one micro-batch")
        offset: Any = {"textcoords": "offset points", "xytext": shift}
        axes.annotate(label, point, fontsize=8.5, color=COLORS[_split_kind(record)], **offset)
    for kind, color in COLORS.items():
        axes.plot([], [], "o", color=color, label=kind)
    axes.legend(title="split over GPUs", frameon=False, fontsize=8.5, loc="lower center", ncols=1,
                bbox_to_anchor=(0.47, 0))  # fmt: skip
    axes.set(
        xlabel="reserved GiB on the GPU that uses the most",
        ylabel="tokens per second",
        xlim=(0, 100),
    )
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(400_000, 850_000)
    axes.grid(alpha=0.25)
    return figure


def bubbles(records: Path) -> Figure:
    """Plot measured and ideal bubbles by schedule."""
    figure, axes = _figure("Idle share of the pipeline in %: measured, and by formula (gray)", 2.8)
    axes.set_title("gpt2-medium, 4 H200s, 4 stages, 8 micro-batches", fontsize=9, loc="left")
    runs = {
        r.pipeline["schedule"]: r
        for name, r in _gpt2_medium_records(records).items()
        if name.startswith("pp ") and name.endswith("-m8") and r.pipeline
    }
    for index, name in enumerate(names := ("1f1b", "interleaved", "zb-h1", "zb-v")):
        share, formula = _idle(runs[name])
        pair = ((-0.2, share, SCHEDULES[name]), (0.2, formula, "#dddddd"))
        for shift, height, color in pair:
            bars = axes.bar(index + shift, height, 0.38, color=color)
            axes.bar_label(bars, [f"{height:.0f}"], fontsize=8.5)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("% idle")
    axes.set_ylim(0, 36)
    return figure


def _idle(record: Record) -> tuple[float, float]:
    """Return the measured idle share and the idle share from the formula, in percent."""
    bubble = read_extra(record, "bubble") or {}
    pipeline = record.pipeline or {}
    return 100 * bubble["idle_share"], 100 * pipeline["ideal_bubble"]


def memory(records: Path) -> Figure:
    """For each layout, plot the peak memory of the fullest GPU, divided into state and other
    memory."""
    names = ("dp", "zero1", "zero2", "zero3", "fsdp", "tp tp4", "pp pp4 1f1b-m8",
             "pp pp4 zb-v-m8", "pp pp4 zb-v-m16", "pp pp4 interleaved-m8",
             "hybrid pp2 dp_shard2 1f1b-m8", "3d pp2 tp2 1f1b-m8")  # fmt: skip
    figure, axes = _figure("Reserved memory in GiB on the GPU that uses the most", 4.0)
    axes.set_title(f"{MEDIUM}; pipelines on another machine", fontsize=9, loc="left")
    best = _gpt2_medium_records(records)
    state = [
        sum(best[name].estimated_state_bytes[part] for part in ("parameters", "gradients",
                                                                "optimizer")) / GIB
        for name in names
    ]  # fmt: skip
    other = [_peak_bytes(best[name]) / GIB - held for name, held in zip(names, state, strict=True)]
    labels = [name.replace("pp pp4", "pp4").replace("tp tp4", "tp4") for name in names]
    axes.barh(labels, state, color="#0072b2", label="state (formula)")
    bars = axes.barh(
        labels, other, left=state, color="#e69f00", label="activations and other memory"
    )
    axes.bar_label(bars, [f"{a + b:.0f}" for a, b in zip(state, other, strict=True)], padding=3)
    axes.invert_yaxis()
    axes.legend(frameon=False, loc="lower right")
    return figure


def overlap(records: Path) -> Figure:
    """Draw the timeline of one GPU in one step, for several strategies."""
    names = ("dp", "fsdp", "tp 4", "tp 2 x fsdp 2", "pp 4, 1f1b")
    subtitle = "gpt2-medium, 4 H200s, 256 x 1,024 tokens per step; GPU 0"
    title = "Communication in one step, and how much of it is exposed"
    return draw_timelines(_overlap(records / "h200-x4-overlap"), names, title, subtitle)


def accuracy(records: Path) -> Figure:
    """Plot predictions against measurements of memory and time: tables as predicted before the
    runs, other runs as predicted today. Name the worst rows."""
    figure = Figure(figsize=(8, 3.9), layout="constrained")
    figure.suptitle("Every published run: predicted against measured", x=0.01, ha="left",
                    fontsize=11, fontweight="bold")  # fmt: skip
    panels: Any = figure.subplots(1, 2)
    for axes, unit, points in zip(
        panels, ("GiB per GPU", "s per step"), _predictions(records), strict=True
    ):
        names, measured, predicted = zip(*points, strict=True)
        ends = [min(measured + predicted) / 1.3, 1.3 * max(measured + predicted)]
        axes.plot(ends, ends, color="#999999", linewidth=0.8)
        axes.plot(measured, predicted, "o", color="#0072b2", markersize=3.5, alpha=0.5)
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
        axes.set(xlabel=f"measured, {unit}", ylabel=f"predicted, {unit}")
        axes.set_title(f"{len(points)} runs", fontsize=9, loc="left")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
        axes.spines[["top", "right"]].set_visible(False)
        ratios = [high / low for low, high in (sorted(point[1:]) for point in points)]
        for index in sorted(range(len(points)), key=ratios.__getitem__)[-2:]:
            is_above = predicted[index] > measured[index]
            axes.annotate(
                names[index].partition(",")[0],
                (measured[index], predicted[index]),
                xytext=(-6, 4) if is_above else (6, -8),
                textcoords="offset points",
                ha="right" if is_above else "left",
                fontsize=7.5,
            )
    return figure


def _predictions(records: Path) -> list[list[tuple[str, float, float]]]:
    """Return (name, measured, predicted) of all runs, for memory in GiB and for time in s."""
    memory_rows, time_rows = [], []
    for row in validate.gpu_rows(records):
        name = f"{row.record.config['model']} {row.record.layout_name}"
        time_rows.append((name, row.measured_s, row.measured_s * (1 + row.time_error)))
        if row.is_memory_comparable:
            gib = row.record.memory["peak_allocated_bytes"] / GIB
            memory_rows.append((name, gib, gib * (1 + row.memory_error)))
    tables = [load_json(path, "record") for path in sorted(records.glob("*/*.json"))]
    sections = [section for table in tables for section in table.values()]
    for section in (section for section in sections if isinstance(section, dict)):
        for name, row in section.items():
            for key, points in (("GiB", memory_rows), ("step_time_s", time_rows)):
                if isinstance(row, dict) and row.get(f"predicted {key}") and row.get(key):
                    points.append((name, row[key], row[f"predicted {key}"]))
    return [memory_rows, time_rows]


def _overlap(folder: Path, name: str = "overlap.json") -> dict[str, Any]:
    record: dict[str, Any] = load_json(folder / name, "record")
    return record


def _figure(title: str, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, height), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _read(folder: Path) -> list[Record]:
    return [load_record(path) for path in sorted(folder.glob("*.json"))]


def _gpt2_medium_records(records: Path) -> dict[str, Record]:
    """Return the records for gpt2-medium on four GPUs, keyed by layout name."""
    all_records = [*_read(records / "h200-x4-pipelines"), *_read(records / "h200-x4")]
    return {
        r.layout_name: r
        for r in all_records
        if r.config["model"] == "gpt2-medium" and r.config["max_length"] == 1024
    }


def _speed(record: Record) -> float:
    return float(record.performance["tokens_per_s"])


def _peak_bytes(record: Record) -> float:
    """Return the peak number of bytes that the allocator reserved on the fullest rank."""
    return float(record.memory["peak_reserved_bytes"])


def _split_kind(record: Record) -> str:
    mesh = record.mesh
    name = record.strategy["name"]
    if mesh["pp"] > 1:
        return "layers" if mesh["tp"] == mesh["dp_shard"] == 1 else "layers and more"
    return "each layer" if mesh["tp"] > 1 else "nothing" if name == "dp" else "state"


FIGURES: dict[str, Callable[[Path], Figure]] = {
    "tradeoff.svg": tradeoff,
    "bubbles.svg": bubbles,
    "memory.svg": memory,
    "overlap.svg": overlap,
    "accuracy.svg": accuracy,
    "bugs.svg": bugs.picture,
}


def update_figures(documents: Sequence[Path], records: Path, folder: Path, *, write: bool) -> None:
    """Draw the figures that the documents show, and save them in `folder`. Without `write`, raise
    UserError if a saved figure does not match its records."""
    texts = [document.read_text(encoding="utf-8") for document in documents]
    for name, draw in FIGURES.items():
        file = folder / name
        if not any(f"{folder.name}/{name}" in text for text in texts):
            continue
        svg = render(draw, records)
        if write:
            folder.mkdir(exist_ok=True)
            file.write_text(svg, encoding="utf-8")
        elif not file.is_file() or file.read_text(encoding="utf-8") != svg:
            raise UserError(f"{file} differs from its records", fix="run: make docs")
