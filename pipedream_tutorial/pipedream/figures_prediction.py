"""The picture of records of the runtime: measured utilisation as points, simulated as lines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from pipedream.drawing import LINE_COLOURS, TEXT, new_figure
from pipedream.figures import panel_title
from pipedream.figures_compare import MARKERS
from pipedream.schedules import SCHEDULES

Record = Mapping[str, Any]


HOLLOW: dict[str, Any] = {
    "markerfacecolor": "none", "markeredgewidth": 1.8, "markersize": 9, "linestyle": "",
}  # fmt: skip


def draw_prediction(records: Sequence[tuple[str, Record]], path: Path) -> Figure:
    """Two panels a record (its text, and the record): utilisation against m, and below it how far
    the simulation is off.

    Runs that the durations were taken from are drawn filled. Cases without a prediction are left
    out. The PNG's metadata has a digest of what is drawn (see digest).
    """
    cases = [case for _, record in records for case in predicted_cases(record)]
    styles = _styles(cases)
    worst = max(abs(points_off(case)) for case in cases if not case["calibrated_on"])
    legend = [
        Line2D([], [], label=SCHEDULES[name].title, **HOLLOW | style)
        for name, style in styles.items()
    ]
    legend += [
        Line2D([], [], color="black", linewidth=1.6, label="simulated"),
        Line2D([], [], color="black", marker="o", linestyle="", label="calibrated on"),
    ]
    columns = min(2, len(records))
    figure, axes = new_figure(
        f"Utilisation measured and simulated: at most {worst:.1f} percentage points apart in runs "
        "that the simulator was not calibrated on",
        [3.0, 1.6] * -(-len(records) // columns),
        columns=columns,
        legend=legend,
        head=0.5,
        gap=1.05,
        notes=["Points: measured; lines: simulated. Below: simulated minus measured, in points"],
    )
    limit = 1.25 * max(1.0, *(abs(points_off(case)) for case in cases))
    for place, (text, record) in enumerate(records):
        first = place // columns * 2 * columns + place % columns
        upper, lower = axes[first], axes[first + columns]
        panel_title(upper, text)
        _draw_record(upper, lower, predicted_cases(record), styles)
        lower.set_ylim(-limit, limit)
        if place % columns == 0:
            upper.set_ylabel("utilisation", fontsize=TEXT)
            lower.set_ylabel("points", fontsize=TEXT)
    if len(records) % columns:
        axes[-1].remove()
        axes[-1 - columns].remove()
    figure.savefig(path, metadata={"Software": None, "Source": digest(records)})
    return figure


def _styles(cases: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    names = dict.fromkeys(case["schedule"] for case in cases)
    return {
        name: {"color": LINE_COLOURS[1 + i % 7], "marker": MARKERS[i % len(MARKERS)]}
        for i, name in enumerate(names)
    }


def _draw_record(
    upper: Axes,
    lower: Axes,
    cases: Sequence[Mapping[str, Any]],
    styles: Mapping[str, dict[str, Any]],
) -> None:
    for name, style in styles.items():
        own = [case for case in cases if case["schedule"] == name]
        own.sort(key=lambda case: case["num_microbatches"])
        ms = [case["num_microbatches"] for case in own]
        simulated = [case["predicted"]["utilisation"] for case in own]
        upper.plot(ms, simulated, color=style["color"], linewidth=1.6)
        for m, case in zip(ms, own, strict=True):
            filled = {"markerfacecolor": style["color"]} if case["calibrated_on"] else {}
            upper.plot([m], [case["measured"]["utilisation"]], **HOLLOW | style | filled)
            lower.plot([m], [points_off(case)], **HOLLOW | style | filled)
    upper.yaxis.set_major_formatter(PercentFormatter(1))
    upper.set_ylim(0, 1.04)
    lower.axhline(0, color="black", linewidth=0.8)
    lower.set_xlabel("microbatches in a batch, m", fontsize=TEXT)
    ticks = sorted({case["num_microbatches"] for case in cases})
    for ax in (upper, lower):
        ax.set_xscale("log", base=2)
        ax.set_xticks(ticks)
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        ax.set_xlim(min(ticks) / 1.25, max(ticks) * 1.25)
        ax.grid(axis="y", color="#E0E0E0")


def predicted_cases(record: Record) -> list[Mapping[str, Any]]:
    """Those that the calibration says something about."""
    return [case for case in record["cases"] if case["predicted"] is not None]


def points_off(case: Mapping[str, Any]) -> float:
    """Simulated less measured utilisation, in percentage points."""
    return 100 * (case["predicted"]["utilisation"] - case["measured"]["utilisation"])


def digest(records: Sequence[tuple[str, Record]]) -> str:
    """Of all that is drawn."""
    drawn = [
        [
            text,
            *(
                [case["schedule"], case["num_microbatches"], case["calibrated_on"],
                 case["measured"]["utilisation"], case["predicted"]["utilisation"]]
                for case in predicted_cases(record)
            ),
        ]
        for text, record in records
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(drawn).encode()).hexdigest()
