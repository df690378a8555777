"""Fill in the figures in the sentences, lists and tables that people write.

A figure is a number with a unit of time, memory or speed, or a percentage. A comment below the
paragraph numbers the entry of figures.toml that has one value per figure, in the order of the text.
`...` stands for a number that was chosen and not measured, such as the size of a card:

    On cards with 24 GB, `fsdp` reaches 99% of `dp`'s speed.
    <!-- figures 1 -->

    1 = '''..., speed("h200-x4/fsdp") / speed("h200-x4/dp")'''
"""

import functools
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import EllipsisType
from typing import Any

from distributed_training.settings.errors import UserError
from distributed_training.settings.files import ROOT, load_json
from distributed_training.settings.machine import GIB
from results.lab.pages import tables, validate
from results.lab.planner_page.ask import ask

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

UNITS = "[KMGT]i?B|TFLOP/s|tokens/s|tokens per second|times|words|[mµ]?s|seconds?|minutes?|hours?"
FIGURE = re.compile(rf"(?<![\w.,])(\d[\d,]*(?:\.\d+)?)((?:\s+|-)(?:{UNITS})\b|%)")
# Parts of a page that are not sentences
FENCED = r"^```.*?^```"
INDENTED = r"(?<=\n\n) {4}.*?(?=\n\n|\Z)"
GENERATED = r"^<!-- ?\[\[\[cog.*?\[\[\[end\]\]\] ?-->"
OTHER = re.compile(f"({FENCED}|{INDENTED}|{GENERATED})", re.M | re.S)
MARK = re.compile(r"<!-- figures (\d+) -->")
FORMULAS = Path(__file__).with_name("figures.toml")


def printed(arguments: str) -> str:
    """Return what real_model_example.py prints with these arguments."""
    command = [sys.executable, "real_model_example.py", *shlex.split(arguments)]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def repository() -> str:
    """Return the address of the repository."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["urls"]["Repository"])


def plan(options: str) -> dict[str, Any]:
    """Return the first layout of the planner's answer."""
    layout: dict[str, Any] = json.loads(ask(*shlex.split(options)))["layouts"][0]
    return layout


def at(file: str, *keys: str) -> Any:
    """Return a value of a published JSON file: the entry of its first key, of which the entry of
    the second, and so on."""
    return functools.reduce(
        lambda entry, key: entry[key], keys, load_json(ROOT / "results" / file, "record")
    )


def speed(run: str) -> float:
    """Return the tokens per second of a run's record."""
    return float(at(f"records/{run}.json", "performance", "tokens_per_s"))


def reserved(run: str) -> float:
    """Return the reserved GiB on the fullest GPU, from a run's record."""
    return float(at(f"records/{run}.json", "memory", "peak_reserved_bytes")) / GIB


# Names that figures.toml may use
NAMES = {
    "GIB": GIB,
    "at": at,
    "plan": plan,
    "reserved": reserved,
    "speed": speed,
    "statistics": statistics,
    "unsloth_calls": tables.unsloth_calls,
    "validate": validate,
}


def read_formulas(document: Path) -> dict[str, str]:
    """Return the entries of a page in figures.toml."""
    pages = tomllib.loads(FORMULAS.read_text(encoding="utf-8"))
    entries: dict[str, str] = pages.get(os.path.relpath(document, ROOT), {})
    return entries


def fill(text: str, formulas: Mapping[str, str]) -> str:
    """Return a page with the figures that records and `plan` give today. Raises UserError if a
    figure has no value."""
    parts = OTHER.split(text)
    parts[::2] = [
        "\n\n".join(_fill_paragraph(paragraph, formulas) for paragraph in part.split("\n\n"))
        for part in parts[::2]
    ]
    return "".join(parts)


def _fill_paragraph(paragraph: str, formulas: Mapping[str, str]) -> str:
    mark = MARK.search(paragraph)
    end = mark.start() if mark else len(paragraph)
    sentences, rest = paragraph[:end], paragraph[end:]
    formula = formulas[mark[1]] if mark else ""
    values: list[float | EllipsisType] = eval(f"[{formula}]", dict(NAMES))
    found = FIGURE.findall(sentences)
    if len(values) != len(found):
        figures = ", ".join(number + unit for number, unit in found)
        what = f"{len(found)} figures ({figures}) have {len(values)} values: {sentences.strip()}"
        raise UserError(
            what, fix=f"write <!-- figures N --> below it and N = 'VALUE, ...' in {FORMULAS.name}"
        )
    remaining = iter(values)

    def current(figure: re.Match[str]) -> str:
        number, unit = figure.groups()
        value = next(remaining)
        if isinstance(value, EllipsisType):
            return figure[0]
        scale = 100 if unit == "%" else 1
        decimals = len(number.partition(".")[2])
        return f"{scale * value:,.{decimals}f}{unit}"

    return FIGURE.sub(current, sentences) + rest
