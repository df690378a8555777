"""`report`: tables and plots of runs.

python real_model_example.py report [RUN ...]
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from distributed_training.records import page
from distributed_training.records.comparison import group_by_work
from distributed_training.records.display import WIDTH, short_path
from distributed_training.records.record import RECORD_FILE, Record, load_record
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import given_path
from distributed_training.settings.parser import Parser

MAX_TABLES = 3
COMMAND = "python real_model_example.py report"


def find_records(paths: Sequence[Path]) -> list[Record]:
    """The records of runs, of folders of runs and of files, each once, named by where they lie.

    Raises UserError for a file that is none; a folder without one gets a note.
    """
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
    about = short_path(os.path.commonpath([r.run_dir for r in records]))
    if len(records) > 1:
        about = f"{len(records)} runs in {about}"
    left = len(records) - sum(len(comparison.records) for comparison in comparisons)
    note = f"left out: {left} older runs of other work; --all shows them" if left else ""
    texts = [about, *map(page.terminal, comparisons), note]
    print("\n\n".join(filter(None, texts)), flush=True)
    sections = page.build_sections(comparisons)
    try:
        if arguments.html is not None:
            text = page.html("Training runs", about, sections, note)
            arguments.html.write_text(text, encoding="utf-8")
            wrote = short_path(arguments.html)
        else:
            names = ", ".join(page.save_plots(sections, arguments.plots))
            wrote = names and f"{short_path(arguments.plots)}/{names}"
    except OSError as error:
        option = "--plots" if arguments.html is None else "--html"
        what = f"{arguments.html or arguments.plots} cannot be written"
        raise UserError(what, str(error), f"give another place to {option}") from None
    if wrote:
        print(textwrap.fill(f"wrote {wrote}", WIDTH, break_long_words=False))
    return 0
