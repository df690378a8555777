"""Comparisons as text: for a terminal, as Markdown, as one HTML file; and `report`, of any runs.

python real_model_example.py report [RUN ...]
"""

import base64
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tabulate import tabulate

from distributed_training.records.card import fill
from distributed_training.records.display import WIDTH, short_path
from distributed_training.records.record import RECORD_FILE, Record, load_record
from distributed_training.records.tables import MARKDOWN, Comparison, Table, group_by_work
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import given_path
from distributed_training.settings.keys import Parser

MAX_TABLES = 3
COMMAND = "python real_model_example.py report"
NAME_WIDTH = 26
# Given up in this order where a terminal is too narrow.
LEAST = (
    "MFU", "validation perplexity", "ms a step", "runs", "peak host memory", "training loss",
)  # fmt: skip
WORDS = {"run", "strategy", "layout", "status", "verdict", "mostly"}  # columns aligned left


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


def terminal(section: Section) -> str:
    """Title, first table and notes, as wide as the terminal; a table that would be wider goes
    without the least of its columns."""
    width = shutil.get_terminal_size((WIDTH, 0)).columns
    columns = section.tables[0].columns
    for least in ("", *LEAST):
        columns = {name: cells for name, cells in columns.items() if name != least}
        headings = [name.replace("peak ", "").replace(" ", "\n", 1) for name in columns]
        text = tabulate(
            [headings, *zip(*columns.values(), strict=True)],  # as headings they get padding
            tablefmt="plain", disable_numparse=True, colalign=_align(columns),
            maxcolwidths=[NAME_WIDTH, *[None] * (len(columns) - 1)],
        )  # fmt: skip
        if max(map(len, text.splitlines())) <= width:
            break
    notes = [textwrap.fill(note, width) for note in section.notes]
    return "\n".join([textwrap.fill(section.title, width), text, *notes])


def _align(headers: Iterable[str]) -> list[str]:
    return ["left" if name in WORDS else "right" for name in headers]


def save_plots(sections: Sequence[Section], folder: Path) -> list[str]:
    """Write the plots into `folder`; the files' names. Raises OSError where that cannot be."""
    plots = {f"{name}.png": png for section in sections for name, png in section.plots.items()}
    for name, png in plots.items():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(png)
    return list(plots)


def page(form: str, title: str, heading: str, sections: Sequence[Section], note: str = "") -> str:
    """As Markdown, for a repository, the plots beside it; as HTML, one file: no network, no script,
    light or dark, any width."""
    return fill(
        f"page.{form}.jinja", title=title, heading=heading, sections=sections, note=note,
        tabulate=tabulate, markdown=MARKDOWN, align=_align, b64encode=base64.b64encode,
    )  # fmt: skip


def find_records(paths: Sequence[Path]) -> list[Record]:
    """The records of runs, of folders of runs and of files, each once, named by where they lie; a
    folder without one gets a note. Raises UserError for a file that is none."""
    found: dict[Path, Record] = {}
    for path in map(given_path, paths):
        files = [path]
        if path.is_dir():
            below = sorted([*path.glob(f"[!.]*/{RECORD_FILE}"), *path.glob("*.json")])
            files = [path / RECORD_FILE] if (path / RECORD_FILE).is_file() else below
        here = {}
        for file in map(Path.resolve, files):  # runs/latest is a link
            try:
                record = load_record(file)
            except UserError:
                if path.is_dir():
                    continue
                raise
            place = file.parent if file.name == RECORD_FILE else file.with_suffix("")
            here[file] = record.model_copy(update={"run_dir": str(place)})
        if not here:
            print(f"note: {path} holds no {RECORD_FILE}; left out", file=sys.stderr)
        found |= here
    return list(found.values())


def main(argv: Sequence[str], output_dir: Path = Path("runs")) -> int:
    """Command line; without paths, the runs in `output_dir`. The exit code, or UserError."""
    parser = Parser(prog=COMMAND, description="Tables and plots from run records.")
    add = parser.add_argument
    add("paths", nargs="*", type=Path, help="runs, folders of runs, or records")
    add("--all", action="store_true", help=f"every kind of work, not the newest {MAX_TABLES}")
    add("--plots", type=Path, default=Path("report"), help="folder for the plots")
    add("--html", type=Path, metavar="FILE", help="tables and plots in one page instead")
    arguments = parser.parse_args(argv)
    paths = arguments.paths or [output_dir]
    records = find_records([path for path in paths if arguments.paths or path.is_dir()])
    if not records:
        fix = f"train first, or name runs: {COMMAND} FOLDER"
        raise UserError(f"no run record in {', '.join(map(short_path, paths))}", fix=fix)
    comparisons = group_by_work(records)[: None if arguments.all else MAX_TABLES]
    sections = build_sections(comparisons)
    about = short_path(os.path.commonpath([r.run_dir for r in records]))
    if len(records) > 1:
        about = f"{len(records)} runs in {about}"
    left = len(records) - sum(len(comparison.records) for comparison in comparisons)
    note = f"left out: {left} older runs of other work; --all shows them" if left else ""
    print("\n\n".join(filter(None, [about, *map(terminal, sections), note])), flush=True)
    try:
        if arguments.html is not None:
            text = page("html", "Training runs", about, sections, note)
            arguments.html.write_text(text, encoding="utf-8")
            wrote = short_path(arguments.html)
        else:
            names = ", ".join(save_plots(sections, arguments.plots))
            wrote = names and f"{short_path(arguments.plots)}/{names}"
    except OSError as error:
        option = "--plots" if arguments.html is None else "--html"
        what = f"{arguments.html or arguments.plots} cannot be written"
        raise UserError(what, str(error), f"give another place to {option}") from None
    if wrote:
        print(textwrap.fill(f"wrote {wrote}", WIDTH, break_long_words=False))
    return 0
