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

from distributed_training.records.comparison import Comparison, Table, results
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
    title: str
    notes: Sequence[str]
    tables: Sequence[Table]
    plots: Mapping[str, bytes] = field(default_factory=dict)  # name -> PNG


def build_sections(comparisons: Sequence[Comparison]) -> list[Section]:
    """Notes, tables and plots of each; the plots' names are numbered where there are several."""
    from distributed_training.records.plots import draw_pngs  # slow to import

    found = []
    for number, each in enumerate(comparisons, 1):
        suffix = f"-{number}" if len(comparisons) > 1 else ""
        plots = {name + suffix: png for name, png in draw_pngs(each).items()}
        found.append(Section(each.title, each.notes, each.tables(), plots))
    return found


def terminal(comparison: Comparison) -> str:
    """Title, results and notes, as wide as the terminal."""
    width = shutil.get_terminal_size((WIDTH, 0)).columns
    notes = [textwrap.fill(note, width) for note in comparison.notes]
    title = textwrap.fill(comparison.title, width)
    return "\n".join([title, plain(results(comparison), width), *notes])


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


def save_plots(sections: Sequence[Section], folder: Path) -> list[str]:
    """Write the plots into `folder`; the files' names. Raises OSError where that cannot be."""
    plots = {f"{name}.png": png for section in sections for name, png in section.plots.items()}
    for name, png in plots.items():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(png)
    return list(plots)


def markdown(title: str, heading: str, sections: Sequence[Section]) -> str:
    """The page for a repository, beside which the plots lie."""
    lines = [f"# {title}", "", heading]
    for section in sections:
        for line in (f"## {section.title}", *section.notes):
            lines += ["", line]
        for table in section.tables:
            text = tabulate(table.rows, table.headers, **MARKDOWN)
            lines += ["", f"### {table.title}", "", table.about, "", text]
        for name in section.plots:
            lines += ["", f"![{name}]({name}.png)"]
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
