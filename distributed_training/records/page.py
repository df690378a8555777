"""Comparisons as text: for a terminal, as Markdown, as one HTML file."""

from __future__ import annotations

import base64
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from tabulate import tabulate

from distributed_training.records.comparison import Comparison, Table
from distributed_training.records.display import WIDTH
from distributed_training.records.tables import MARKDOWN

NAME_WIDTH = 26
# Given up in this order where a terminal is too narrow.
LEAST = (
    "MFU", "validation perplexity", "ms a step", "runs", "peak host memory", "training loss",
)  # fmt: skip
WORDS = {"run", "strategy", "layout", "status", "verdict", "mostly"}  # columns aligned left
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
img { width: 36rem; max-width: 100%; height: auto }
</style>
"""


@dataclass(frozen=True, slots=True)
class Section:
    """Of a page."""

    title: str
    notes: Sequence[str]
    tables: Sequence[Table]
    plots: Mapping[str, bytes] = field(default_factory=dict)  # name -> PNG


def build_section(comparison: Comparison) -> Section:
    """A comparison's notes, tables and plots."""
    from distributed_training.records.plots import draw_pngs  # slow to import

    plots = draw_pngs(comparison)
    return Section(comparison.title, comparison.notes, comparison.tables(), plots)


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


def save_plots(sections: Sequence[Section], folder: Path) -> list[list[Path]]:
    """NAME.png, numbered where there are several sections, for each plot of each; the paths. Raises
    OSError where nothing can be written."""
    found = []
    for number, section in enumerate(sections, 1):
        suffix = f"-{number}" if len(sections) > 1 else ""
        found.append([folder / f"{name}{suffix}.png" for name in section.plots])
        for path, png in zip(found[-1], section.plots.values(), strict=True):
            folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png)
    return found


def markdown(
    title: str, heading: str, sections: Sequence[Section], plots: Sequence[Sequence[Path]]
) -> str:
    """The page for a repository; `plots` of each section lie beside it."""
    lines = [f"# {title}", "", heading]
    for section, paths in zip(sections, plots, strict=True):
        for line in (f"## {section.title}", *section.notes):
            lines += ["", line]
        for table in section.tables:
            text = tabulate(table.rows, table.headers, **MARKDOWN)
            lines += ["", f"### {table.title}", "", table.about, "", text]
        for path in paths:
            lines += ["", f"![{path.stem}]({path.name})"]
    return "\n".join([*lines, ""])


def html(title: str, heading: str, sections: Sequence[Section], note: str = "") -> str:
    """One file: no network, no script, light or dark, any width."""
    lines = [_HEAD.replace("{title}", escape(title)), f"<h1>{escape(title)}</h1>"]
    lines += [f"<p>{escape(text)}</p>" for text in (heading, note) if text]
    for section in sections:
        lines.append(f"<h2>{escape(section.title)}</h2>")
        lines += [f"<p>{escape(text)}</p>" for text in section.notes]
        for table in section.tables:
            rows = tabulate(
                table.rows, table.headers, "html",
                disable_numparse=True, colalign=_align(table.headers),
            )  # fmt: skip
            lines += [f"<h3>{escape(table.title)}</h3>", f"<p>{escape(table.about)}</p>"]
            lines.append(f'<div class="wide">{rows}</div>')
        lines.append('<div class="plots">')
        for name, png in section.plots.items():
            data = base64.b64encode(png).decode()
            lines.append(f'<img alt="{name}" src="data:image/png;base64,{data}">')
        lines.append("</div>")
    return "\n".join([*lines, ""])
