"""Comparisons as text: for a terminal, as Markdown, as one HTML file."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from tabulate import tabulate

from distributed_training.records.comparison import Comparison, Table
from distributed_training.records.display import WIDTH
from distributed_training.records.tables import MARKDOWN

NAME_WIDTH = 26
# Given up in this order where a terminal is too narrow.
LEAST = (
    "MFU", "validation perplexity", "ms a step", "runs", "peak host memory", "bubble",
    "training loss",
)  # fmt: skip
WORDS = (
    "run",
    "strategy",
    "layout",
    "status",
    "verdict",
    "mostly",
)  # columns that are aligned left
_HEAD = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root { color-scheme: light dark }
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 75rem; margin: auto; padding: 1rem }
h2 { font-size: 1.1rem; margin: 2.5rem 0 .5rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap }
th, td { padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #8886 }
.plots { display: flex; flex-wrap: wrap; gap: 1rem; align-items: flex-start }
svg { width: 29rem; max-width: 100%; height: auto }
</style>
"""


def terminal(comparison: Comparison) -> str:
    """Title, results and notes, as wide as the terminal."""
    width = shutil.get_terminal_size((WIDTH, 0)).columns
    notes = [textwrap.fill(note, width) for note in comparison.notes]
    table = comparison.tables()[0]
    return "\n".join([textwrap.fill(comparison.title, width), plain(table, width), *notes])


def plain(table: Table, width: int) -> str:
    """A table for a terminal; without the least columns where it would be wider than `width`."""
    columns = dict(zip(table.headers, zip(*table.rows, strict=True), strict=True))
    for least in ("", *LEAST):
        columns.pop(least, None)
        headings = [name.replace("peak ", "").replace(" ", "\n", 1) for name in columns]
        text = tabulate(
            [headings, *zip(*columns.values(), strict=True)],  # as headings they get padding
            tablefmt="plain", disable_numparse=True, colalign=_align(list(columns)),
            maxcolwidths=[NAME_WIDTH, *[None] * (len(columns) - 1)],
        )  # fmt: skip
        if max(map(len, text.splitlines())) <= width:
            break
    return text


def _align(headers: Sequence[str]) -> list[str]:
    return ["left" if name in WORDS else "right" for name in headers]


def markdown(
    title: str, heading: str, comparisons: Sequence[Comparison], plots: Sequence[Sequence[Path]]
) -> str:
    """The page for a repository; `plots` of each comparison lie beside it."""
    lines = [f"# {title}", "", heading]
    for comparison, paths in zip(comparisons, plots, strict=True):
        for line in (f"## {comparison.title}", *comparison.notes):
            lines += ["", line]
        for table in comparison.tables():
            text = tabulate(table.rows, table.headers, **MARKDOWN)
            lines += ["", f"### {table.title}", "", table.about, "", text]
        for path in paths:
            lines += ["", f"![{path.stem}]({path.name})"]
    return "\n".join([*lines, ""])


@dataclass(frozen=True, slots=True)
class Section:
    """Of an HTML page."""

    title: str
    notes: Sequence[str]
    tables: Sequence[Table]
    pictures: Sequence[str] = ()  # <svg> elements


def sections(comparisons: Sequence[Comparison]) -> list[Section]:
    """Each comparison's notes, tables and plots."""
    from distributed_training.records.plots import draw_svgs  # slow to import

    return [
        Section(each.title, each.notes, each.tables(), draw_svgs(each, str(number)))
        for number, each in enumerate(comparisons, 1)
    ]


def html(title: str, heading: str, parts: Sequence[Section], note: str = "") -> str:
    """One file: no network, no script, light or dark, any width."""
    lines = [_HEAD.replace("{title}", escape(title)), f"<h1>{escape(title)}</h1>"]
    lines += [f"<p>{escape(text)}</p>" for text in (heading, note) if text]
    for part in parts:
        lines.append(f"<h2>{escape(part.title)}</h2>")
        lines += [f"<p>{escape(text)}</p>" for text in part.notes]
        for table in part.tables:
            rows = tabulate(
                table.rows, table.headers, "html",
                disable_numparse=True, colalign=_align(table.headers),
            )  # fmt: skip
            lines += [f"<h3>{escape(table.title)}</h3>", f"<p>{escape(table.about)}</p>"]
            lines.append(f'<div class="wide">{rows}</div>')
        lines.append(f'<div class="plots">{"".join(part.pictures)}</div>')
    return "\n".join([*lines, ""])
