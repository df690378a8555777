"""Format timelines and numbers as text for the terminal."""

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from fractions import Fraction

import pipedream_simple as simple
from pipedream_simple import number

from pipedream.simulate.simulator import Timeline

LEGEND = f"{simple.LEGEND}, or of more than two F0/0, F0/1 ...; &: both together"
# Okabe and Ito's colors, which color-blind readers can also distinguish, as 256-color codes
_BACKGROUND = {"F": 74, "B": 214, "I": 227, "W": 36, "&": 175}


def draw(timeline: Timeline, columns: int, *, color: bool = False) -> str:
    """Draw a timeline as text: a time axis and one line per rank, in the format of
    pipedream_simple.py. Lines are wrapped at `columns`."""
    paint = _color_letters if color else lambda text, letters: letters
    return simple.draw(cells_of(timeline), columns, paint)


def cells_of(timeline: Timeline) -> list[simple.Cell]:
    """Return the cells of a timeline. If a rank has more than two stages, their texts name the
    stage's position on the rank."""
    chunk_of_stage = [
        {s: position for position, s in enumerate(stages)}
        for stages in timeline.schedule.stages_by_rank()
    ]
    cells = []
    for rank, item, start, end in timeline.events:
        has_many_chunks = len(chunk_of_stage[rank]) > 2
        texts = []
        for kind, stage, i in item.parts:
            position = chunk_of_stage[rank][stage]
            letter = kind.lower() if position else kind
            texts.append(f"{kind}{i}/{position}" if has_many_chunks else f"{letter}{i}")
        cells.append((rank, "&".join(texts), start, end))
    return cells


def _color_letters(text: str, letters: str) -> list[str]:
    """Color the letters of a cell by the kind of its operation. All pairs have the same color."""
    background = _BACKGROUND["&" if "&" in text else text[0].upper()]
    return [f"\x1b[30;48;5;{background}m{letter}\x1b[0m" for letter in letters]


def print_wrapped(text: str, prefix: str = "") -> None:
    """Print `prefix` and `text`, wrapped at the width of the terminal. Continuation lines are
    indented by the length of `prefix`."""
    print(textwrap.fill(text, width(), initial_indent=prefix, subsequent_indent=" " * len(prefix)))


def format_values(values: Sequence[Fraction | int], unit: str) -> str:
    """Return the values as text: one value per `unit`, or a single value if all are equal."""
    if len(set(values)) == 1:
        return f"{number(values[0])} on every {unit}"
    return f"{' '.join(map(number, values))} by {unit}"


def width() -> int:
    """Return the width of the terminal in columns (at least 40), or 100 if the width is unknown."""
    return max(40, shutil.get_terminal_size((100, 24)).columns)


def use_color() -> bool:
    """Return whether to use color. Color is off if NO_COLOR is set (no-color.org) or stdout is not
    a terminal."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def bold(text: str) -> str:
    return f"\x1b[1m{text}\x1b[0m" if use_color() else text
