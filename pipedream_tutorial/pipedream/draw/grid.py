"""A rank x time grid, drawn from a timeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from pipedream.draw.page import DPI, EDGE, LEAST, SMALL, TEXT, Colour, ink, number, paler
from pipedream.schedules.ops import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Op, Schedule
from pipedream.simulate.simulator import Event, Timeline

KIND_COLOURS = {
    FORWARD: "#56B4E9",
    BACKWARD: "#D55E00",
    INPUT_GRADIENT: "#F0E442",
    WEIGHT_GRADIENT: "#00523B",
}


KIND_TEXTS = {
    FORWARD: "F  forward",
    BACKWARD: "B  whole backward",
    INPUT_GRADIENT: "I  input gradient",
    WEIGHT_GRADIENT: "W  weight gradient",
}


IDLE_HATCH: dict[str, Any] = {
    "facecolor": "#FFFFFF",
    "edgecolor": "#C9C9C9",
    "hatch": "////",
    "linewidth": 0.0,
}


Colouring = Callable[[Op], Colour]


Labeller = Callable[[Op], str]


Box = tuple[float, float, float, float]
"""x, y, width, height in data units."""


ROW = 0.88
"""Height of a rank's cells, where ranks are 1 apart."""


def kind_colours(schedule: Schedule) -> Colouring:
    """The colour of an operation's kind, paler for a rank's second, third ... stage.

    Of two copies of the model, the second one's stages are the paler ones on all ranks.
    """
    position, own = schedule.position(), stages_by_rank(schedule)
    copy = {stage: number for number, chain in enumerate(schedule.chains) for stage in chain}
    pale = {
        stage: place / max(2, len(stages))
        for stages in own
        for place, stage in enumerate(sorted(stages, key=lambda s: (copy[s], position[s])))
    }

    return lambda op: paler(KIND_COLOURS[op.kind], pale[op.stage])


def stages_by_rank(schedule: Schedule) -> list[set[int]]:
    """The stages whose operations each rank runs."""
    return [{op.stage for item in order for op in item.parts} for order in schedule.orders]


def microbatch_number(op: Op) -> str:
    """What cells show by default."""
    return str(op.microbatch)


def kind_legend(timelines: Sequence[Timeline]) -> list[Artist]:
    """Swatches for the kinds that occur, and for idle time."""
    kinds = {op.kind for timeline in timelines for op in timeline.schedule.ops()}
    swatches: list[Artist] = [
        Patch(facecolor=colour, edgecolor=EDGE, linewidth=0.6, label=KIND_TEXTS[kind])
        for kind, colour in KIND_COLOURS.items()
        if kind in kinds
    ]
    if any(len(own) > 1 for t in timelines for own in stages_by_rank(t.schedule)):
        second = paler(KIND_COLOURS[FORWARD], 1 / 2)
        copies = {len(t.schedule.chains) for t in timelines}
        text = "paler: 2nd stage or copy" if max(copies) > 1 else "paler: a rank's second stage"
        swatches.append(Patch(facecolor=second, edgecolor=EDGE, linewidth=0.6, label=text))
    return [*swatches, Patch(**IDLE_HATCH, label="idle")]


def row_height(num_ranks: int) -> float:
    """Inches for one rank's row: lower where there are many."""
    return max(0.16, min(0.34, 2.2 / num_ranks))


def draw_grid(
    ax: Axes,
    timeline: Timeline,
    *,
    until: Fraction | None = None,
    colour: Colouring | None = None,
    labels: Sequence[Labeller] = (microbatch_number,),
) -> None:
    """One rectangle for each operation: x and width are its time, y its rank (0 on top).

    The halves of a pair share the rank's row. The time axis ends at `until` (the makespan). Cells
    get the first of `labels` that fits in all of them, or the last in those where it fits. Each
    rectangle's gid is the operation as text; behind them lies one a rank, "idle 0", from time 0 to
    the makespan.
    """
    colour = colour or kind_colours(timeline.schedule)
    end = timeline.makespan if until is None else until
    num_ranks = timeline.schedule.num_ranks
    ax.set_xlim(0, 1.002 * float(end))
    ax.set_ylim(num_ranks - 0.5, -0.5)
    for rank in range(num_ranks):
        place = (0.0, rank - ROW / 2), float(timeline.makespan), ROW
        ax.add_patch(Rectangle(*place, **IDLE_HATCH, gid=f"idle {rank}"))
    cells = [cell for event in timeline.all_events() for cell in _cells(event)]
    narrowest = min(box[2] for _, box in cells if box[2] > 0) * points_per_unit(ax)[0]
    edge: dict[str, Any] = {"edgecolor": EDGE, "linewidth": min(0.6, 0.08 * narrowest)}
    for op, (x, y, width, height) in cells:
        cell = Rectangle((x, y), width, height, facecolor=colour(op), **edge, gid=str(op))
        ax.add_patch(cell)
    inside = [(op, box) for op, box in cells if box[0] + box[2] <= float(end) and box[2] > 0]
    _write_labels(ax, inside, colour, labels)
    rank_axis(ax, num_ranks)


def points_per_unit(ax: Axes) -> tuple[float, float]:
    """Printer's points that one unit of an axes' x and of its y takes."""
    (left, right), (low, high) = ax.get_xlim(), ax.get_ylim()
    return (
        ax.bbox.width / abs(right - left) * 72 / DPI,
        ax.bbox.height / abs(high - low) * 72 / DPI,
    )


def rank_axis(ax: Axes, num_ranks: int, *, most_times: int = 12) -> None:
    """A tick for every rank, and at most so many for whole times."""
    ax.set_yticks(range(num_ranks), [str(rank) for rank in range(num_ranks)])
    ax.set_ylabel("rank", fontsize=TEXT)
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=most_times, integer=True))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda time, _: number(time)))


def _cells(event: Event) -> list[tuple[Op, Box]]:
    """(operation, box): a pair's forward lies above its backward."""
    parts = event.item.parts
    height = ROW / len(parts)
    return [
        (
            op,
            (
                float(event.start),
                event.rank - ROW / 2 + place * height,
                float(event.end - event.start),
                height,
            ),
        )
        for place, op in enumerate(parts)
    ]


def _write_labels(
    ax: Axes, cells: Sequence[tuple[Op, Box]], colour: Colouring, labels: Sequence[Labeller]
) -> None:
    across, down = points_per_unit(ax)

    def room(op: Op, box: Box, label: Labeller) -> float:
        """The largest font, in points, with which the label stays inside the cell."""
        lines = label(op).split("\n")
        # A digit of DejaVu Sans is 0.64 of the font's size wide, a line 1.2 of it high.
        by_width = (box[2] * across - 2) / (0.66 * max(map(len, lines)))
        return min(by_width, (box[3] * down - 1) / (1.2 * len(lines)))

    for label in labels:
        rooms = [room(op, box, label) for op, box in cells]
        if min(rooms, default=0) >= LEAST:
            break
    size = min(SMALL, max(LEAST, min(rooms, default=0)))
    # Where some cells are too small, their kind goes without: half a row of numbers misleads.
    tight = {
        (op.kind, box[3]) for (op, box), space in zip(cells, rooms, strict=True) if space < size
    }
    for op, (x, y, width, height) in cells:
        if (op.kind, height) not in tight:
            ax.text(
                x + width / 2, y + height / 2, label(op), ha="center", va="center",
                fontsize=size, color=ink(colour(op)), linespacing=1.05,
            )  # fmt: skip
