"""Draw timelines of rank 0's computation and communication. The record's `command` names the commit
that has the program which made it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import PathPatch
from matplotlib.path import Path

COMPUTES = "#0072b2"
COMMUNICATES = "#e69f00"
EXPOSED = "#000000"
INCHES = 900 / 96  # width of a README


def draw(record: Mapping[str, Any], names: Sequence[str], title: str, about: str) -> Figure:
    """Draw a panel for each of the named runs, with a lane for each of rank 0's activities. The
    panels share one time axis in milliseconds."""
    runs = [record["runs"][name] for name in names]
    lanes = [_lanes(run["timeline"]) for run in runs]
    heights = [len(run_lanes) + 1.6 for run_lanes in lanes]  # with the panel's title
    tight = ConstrainedLayoutEngine(h_pad=0.02, hspace=0)
    figure = Figure(figsize=(INCHES, 0.85 + 0.165 * sum(heights)), layout=tight)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    panels = figure.subplots(
        len(runs), sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    for axes, name, run, run_lanes in zip(panels, names, runs, lanes, strict=True):
        _draw_lanes(axes, run_lanes)
        above = f"{about}\n" if axes is panels[0] else ""
        axes.set_title(f"{above}{name}: {_shares_text(run)}", fontsize=9, loc="left", pad=3)
        axes.axvline(run["timeline"]["step_us"] / 1000, color="#999999", linewidth=0.8)
        axes.tick_params(axis="x", length=3 if axes is panels[-1] else 0)
    panels[-1].set_xlim(0, max(run["timeline"]["step_us"] for run in runs) / 1000)
    panels[-1].set_xlabel("milliseconds from the start of the step")
    return figure


def _lanes(timeline: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Map the label of each lane to its color and spans, from top to bottom."""
    kinds = {kind: (COMMUNICATES, spans) for kind, spans in timeline["by_kind"].items() if spans}
    ends = (COMPUTES, timeline["computing"]), (EXPOSED, timeline["exposed"])
    return {"computation": ends[0], **kinds, "exposed": ends[1]}


def _draw_lanes(axes: Axes, lanes: Mapping[str, tuple[str, Any]]) -> None:
    for lane, (color, spans) in enumerate(lanes.values()):
        top = lane + 0.1
        bottom = lane + 0.9
        corners = [
            corner
            for begin, end in spans
            for corner in ((begin, top), (end, top), (end, bottom), (begin, bottom), (begin, top))
        ]
        codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(spans)
        # One path per lane, because one bar per span would make the file four times as long
        vertices = np.array(corners, dtype=float).reshape(-1, 2) / (1000, 1)
        bars = Path(vertices, codes)
        axes.add_patch(PathPatch(bars, color=color, linewidth=0))
    axes.set_yticks([lane + 0.5 for lane in range(len(lanes))], list(lanes), fontsize=8)
    axes.set_ylim(len(lanes), 0)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _shares_text(run: Mapping[str, Any]) -> str:
    """Describe rank 0's total and exposed communication as percentages of the step time."""
    times = run["ranks"][0]["traced_s"]
    shares = (100 * times[part] / times["step"] for part in ("communicating", "exposed"))
    communicating, exposed = shares
    return f"communication takes {communicating:.0f}% of the step (exposed: {exposed:.0f}%)"
