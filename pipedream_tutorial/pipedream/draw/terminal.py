"""The terminal's view: a timeline as text, a line a rank, a cell an operation; and its figures."""

import math
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import groupby
from typing import NamedTuple

from pipedream_simple import number

from pipedream.schedules.ops import Item, Op, Schedule
from pipedream.simulate.simulator import Timeline

IDLE = "."
RUNNING = "-"
LEGEND = (
    "F forward; B backward, or its halves I (the input's gradient) and W (the weights'); R forward "
    f"again; number: microbatch; {RUNNING} goes on; {IDLE} idle; f, b, i, w, r: on the rank's "
    "second stage, or all stages of a rank as a, b, c ...; &: both together"
)
# Okabe and Ito's colours, told apart by colour-blind readers too, as 256-colour codes.
_BACKGROUND = {"F": 74, "B": 214, "I": 227, "W": 36, "R": 252, "&": 175}


class Scale(NamedTuple):
    """How time becomes columns."""

    rate: Fraction  # columns per unit of time
    exact: bool  # whether every start and end falls on a column's edge
    numbers: bool  # whether cells are wide enough for microbatch numbers; otherwise only letters
    gap: int  # columns left blank after each cell's text
    blocks: int  # lines that each rank is wrapped over
    width: int  # columns in one of these lines


def choose_scale(timeline: Timeline, columns: int, max_blocks: int = 3) -> Scale:
    """The most readable scale that shows the whole timeline in `max_blocks` lines a rank.

    In this order: numbers with gaps or without, on as few lines as possible; letters alone on one
    line. Where nothing fits, numbers with gaps, and the end is not shown. The text of every event
    of the median duration or more fits into its columns.
    """
    label = _labels(timeline.schedule)
    sized = ((event.end - event.start, len(label(event.item))) for event in timeline.events)
    lasting = sorted(cell for cell in sized if cell[0] > 0)
    typical = (len(lasting) - 1) // 2
    cells = [cell for cell in lasting if cell[0] >= lasting[typical][0]]
    unit = timeline.tick
    scales = []
    for numbers, gap in ((True, 1), (True, 0), (False, 0)):
        rate = max(((text if numbers else 1) + gap) / duration for duration, text in cells)
        # A tick far below a column would stretch the grid: columns are rounded then.
        exact = rate * unit * 2 > 1
        if exact:
            rate = math.ceil(rate * unit) / unit
        per_unit = int(rate * unit) if exact else 1
        units = math.ceil(timeline.makespan * rate / per_unit)
        units_per_block = max(1, columns // per_unit)
        blocks = min(max_blocks, math.ceil(units / units_per_block))
        width = min(units_per_block, math.ceil(units / blocks)) * per_unit
        if numbers or blocks == 1:
            scales.append(Scale(rate, exact, numbers, gap, blocks, width))
    whole = [s for s in scales if timeline.makespan * s.rate <= s.width * s.blocks]
    return min(whole, key=lambda s: (not s.numbers, s.blocks, -s.gap), default=scales[0])


def _labels(schedule: Schedule) -> Callable[[Item], str]:
    """How to write an item: F0 on a rank's first stage, f0 on its second; of more, F0a, F0b ..."""
    own = schedule.stages()
    places = {stage: place for stages in own for place, stage in enumerate(stages)}
    many = max(map(len, own)) > 2

    def one(op: Op) -> str:
        place = places[op.stage]
        if many:
            return f"{op.kind}{op.microbatch}{chr(ord('a') + place)}"
        kind = op.kind.lower() if place else op.kind
        return f"{kind}{op.microbatch}"

    return lambda item: "&".join(map(one, item.parts))


def draw(timeline: Timeline, columns: int, *, colour: bool = False, max_blocks: int = 3) -> str:
    """Lines of at most `columns` columns: a time axis and a line a rank, wrapped where too long. A
    last line says so where columns are rounded or the end is not shown."""
    prefix = len(f"rank {timeline.schedule.num_ranks - 1} ")
    scale = choose_scale(timeline, max(10, columns - prefix), max_blocks)
    total = math.ceil(timeline.makespan * scale.rate)
    shown = min(total, scale.width * scale.blocks)
    label = _labels(timeline.schedule)
    # (character, kind) of every column; the kind is empty where nothing is coloured.
    rows = [[(IDLE, "")] * shown for _ in timeline.ends]
    for event in timeline.events:
        first = math.floor(event.start * scale.rate)
        end = math.floor(event.end * scale.rate)
        text = label(event.item)
        kind = "&" if "&" in text else text[0].upper()
        if not scale.numbers or len(text) > end - first:  # never a number that is cut short
            text = kind if kind == "&" else text[0]
        gap = scale.gap if end - first > len(text) else 0
        room = max(0, min(end, shown) - first)
        cell = text.ljust(min(end - first - gap, room), RUNNING)[: end - first]
        whole = [(letter, kind) for letter in cell] + [(" ", "")] * gap
        rows[event.rank][first : first + room] = whole[:room]
    lines = []
    for begin in range(0, shown, scale.width):
        end = min(begin + scale.width, shown)
        lines.append("time".ljust(prefix) + _axis(scale.rate, begin, end))
        for rank, row in enumerate(rows):
            line = f"rank {rank} ".ljust(prefix)
            for kind, cells in groupby(row[begin:end], key=lambda cell: cell[1]):
                text = "".join(letter for letter, _ in cells)
                if kind and colour:
                    text = f"\x1b[30;48;5;{_BACKGROUND[kind]}m{text}\x1b[0m"
                line += text
            lines.append(line if colour else line.rstrip())
    if not scale.exact:
        lines.append(
            f"(a column is {float(1 / scale.rate):.3g} of time: starts and ends are rounded to it, "
            f"and what is shorter may not show)"
        )
    if shown < total:
        cut = float(shown / scale.rate)
        lines.append(
            f"(shown up to time {cut:g} of {float(timeline.makespan):g}: a wider terminal or fewer "
            f"microbatches show more)"
        )
    return "\n".join(lines)


def _axis(rate: Fraction, begin: int, end: int) -> str:
    """Times above the columns where they begin: multiples of 1, 2 or 5 times a power of ten."""
    steps = (mantissa * Fraction(10) ** power for power in range(-9, 20) for mantissa in (1, 2, 5))
    step = next(step for step in steps if step * rate >= 10)
    line = ""
    for multiple in range(math.ceil(begin / rate / step), math.ceil(end / rate / step)):
        text = f"{float(multiple * step):.12g}"
        column = math.floor(multiple * step * rate) - begin
        if (not line or column > len(line)) and column + len(text) <= end - begin:
            line = line.ljust(column) + text
    return line


def print_wrapped(text: str, begin: str = "") -> None:
    """`begin` and the text, which goes on below itself."""
    print(textwrap.fill(text, width(), initial_indent=begin, subsequent_indent=" " * len(begin)))


def listed(values: Sequence[Fraction | int], what: str) -> str:
    """All values, one for each `what`; or just one where they are equal."""
    if len(set(values)) == 1:
        return f"{number(values[0])} on every {what}"
    shown = [number(value) for value in values]
    if len(shown) > 16:
        shown[8:-4] = ["..."]
    return f"{' '.join(shown)} by {what}"


def width() -> int:
    """Columns of the terminal; 100 where there is none."""
    return max(40, shutil.get_terminal_size((100, 24)).columns)


def use_colour() -> bool:
    """As no-color.org asks: not where NO_COLOR is set, and not into a file."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def bold(text: str) -> str:
    return f"\x1b[1m{text}\x1b[0m" if use_colour() else text
