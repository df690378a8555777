"""The picture of records of the runtime: how far simulated utilisation is from measured."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, PercentFormatter

from pipedream.draw.compare import MARKERS
from pipedream.draw.page import GREY, LINE_COLOURS, SMALL, TEXT, new_figure
from pipedream.runtime.record import GPU_GOAL_POINTS
from pipedream.schedules.catalogue import title_of

Record = Mapping[str, Any]


MORE_MARKERS = "d8H"  # once the others have run out
HOLLOW: dict[str, Any] = {
    "markerfacecolor": "none", "markeredgewidth": 1.8, "markersize": 9, "linestyle": "",
}  # fmt: skip


def draw_prediction(records: Sequence[tuple[str, Record]], path: Path) -> Figure:
    """Every predicted run of the records (their texts, and the records): how far the simulation is
    off against the measured utilisation.

    Runs that the durations were taken from are drawn filled. Cases without a prediction are left
    out. The PNG's metadata has a digest of what is drawn (see digest).
    """
    cases = [(text, record, case) for text, record in records for case in predicted_cases(record)]
    machines = list(dict.fromkeys(_machine(record) for _, record in records))
    colours = {machine: LINE_COLOURS[1 + i % 7] for i, machine in enumerate(machines)}
    names = dict.fromkeys(case["schedule"] for _, _, case in cases)
    markers = dict(zip(names, (*MARKERS, *MORE_MARKERS), strict=False))
    predicted = [each for each in cases if not each[2]["calibrated_on"]]
    text, _, worst = max(predicted, key=lambda each: abs(points_off(each[2])))
    figure, (ax,) = new_figure(
        f"Utilisation simulated and measured: at most {abs(points_off(worst)):.1f} percentage "
        "points apart in runs that the simulator was not calibrated on",
        [4.4],
        legend=_legend(colours, markers),
        legend_columns=4,
        head=0.45,
        left=1.05,
        notes=[
            f"Farthest off: {title_of(worst['schedule'])}, m = {worst['num_microbatches']}, {text}"
        ],
    )
    ax.axhspan(-GPU_GOAL_POINTS, GPU_GOAL_POINTS, color="#EFEFEF", linewidth=0, zorder=0)
    ax.axhline(0, color="black", linewidth=0.8, zorder=1)
    for _, record, case in cases:
        colour = colours[_machine(record)]
        style = HOLLOW | {"color": colour, "marker": markers[case["schedule"]]}
        if case["calibrated_on"]:
            style["markerfacecolor"] = colour
        ax.plot([case["measured"]["utilisation"]], [points_off(case)], **style)
    limit = 1.2 * max(GPU_GOAL_POINTS, *(abs(points_off(case)) for _, _, case in cases))
    ax.set_ylim(-limit, limit)
    ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:+g}" if y else "0"))
    ax.set_xlabel("measured utilisation", fontsize=TEXT)
    ax.set_ylabel("simulated minus measured, points", fontsize=TEXT)
    ax.annotate(
        f"the goal on GPUs: within {GPU_GOAL_POINTS:g} points", (0, -GPU_GOAL_POINTS),
        xycoords=ax.get_yaxis_transform(), xytext=(8, 6), textcoords="offset points",
        fontsize=SMALL, color=GREY,
    )  # fmt: skip
    figure.savefig(path, metadata={"Software": None, "Source": digest(records)})
    return figure


def _legend(colours: Mapping[str, str], markers: Mapping[str, str]) -> list[Artist]:
    """A colour a machine, a marker a schedule."""
    black: dict[str, Any] = HOLLOW | {"color": "black"}
    legend: list[Artist] = [Patch(color=colours[machine], label=machine) for machine in colours]
    legend += [
        Line2D([], [], label=title_of(name), **black | {"marker": markers[name]})
        for name in markers
    ]
    filled = {"marker": "o", "markerfacecolor": "black"}
    legend.append(Line2D([], [], label="calibrated on (filled)", **black | filled))
    return legend


def _machine(record: Record) -> str:
    return f"{record['num_stages']} stages, {record['machine']['device'].partition(',')[0]}"


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
