"""The report as one HTML file: no network, no script, light or dark, any width."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tabulate import tabulate

from distributed_training.records.compare import MEASURED, Work
from distributed_training.records.plots import draw_svgs

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


def build_page(heading: str, works: Sequence[Work], note: str) -> str:
    """The page of all `works`; `heading` says of which runs, `note` what is left out."""
    parts = [f"<p>{escape(heading)}</p>"]
    for work in works:
        columns = work.columns()
        rows = list(zip(*columns.values(), strict=True))
        table = html_table(list(columns), rows, [name in MEASURED for name in columns])
        parts += [f"<h2>{escape(work.title)}</h2>", table]
        parts += [f"<p>{escape(line)}</p>" for line in work.errors()]
        parts.append(html_plots(draw_svgs(work.records)))
    return whole_page("Training runs", [*parts, f"<p>{escape(note)}</p>" * bool(note)])


def whole_page(title: str, parts: Sequence[str]) -> str:
    """One file from HTML elements."""
    head = _HEAD.replace("{title}", escape(title))
    return "\n".join([head, f"<h1>{escape(title)}</h1>", *parts, ""])


def html_table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[bool]
) -> str:
    """A table that scrolls by itself; columns of `numbers` are aligned right."""
    align = ["right" if number else "left" for number in numbers]
    table = tabulate(rows, headers, "html", disable_numparse=True, colalign=align)
    return f'<div class="wide">{table}</div>'


def html_plots(pictures: Sequence[str]) -> str:
    """Pictures beside each other, as far as there is room."""
    return f'<div class="plots">{"".join(pictures)}</div>'
