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
<title>Training runs</title>
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
    parts = [_HEAD, "<h1>Training runs</h1>", f"<p>{escape(heading)}</p>"]
    for work in works:
        columns = work.columns()
        align = ["right" if name in MEASURED else "left" for name in columns]
        rows = zip(*columns.values(), strict=True)
        table = tabulate(rows, list(columns), "html", disable_numparse=True, colalign=align)
        parts += [f"<h2>{escape(work.title)}</h2>", f'<div class="wide">{table}</div>']
        parts += [f"<p>{escape(line)}</p>" for line in work.errors()]
        parts.append(f'<div class="plots">{"".join(draw_svgs(work.records))}</div>')
    return "\n".join([*parts, f"<p>{escape(note)}</p>" * bool(note), ""])
