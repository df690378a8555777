"""`report`: tables and plots of runs.

python real_model_example.py report [RUN ...]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from distributed_training.records import page
from distributed_training.records.comparison import Comparison, describe_runs, group_by_work
from distributed_training.records.display import short_path
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
        if not path.is_dir():
            files = [path]
        elif (path / RECORD_FILE).is_file():
            files = [path / RECORD_FILE]
        else:
            files = sorted([*path.glob(f"[!.]*/{RECORD_FILE}"), *path.glob("*.json")])
        files = [file.resolve() for file in files]  # runs/latest is a link
        for file in files:
            try:
                record = load_record(file)
            except UserError:
                if not path.is_dir():
                    raise
                continue
            place = file.parent if file.name == RECORD_FILE else file.with_suffix("")
            found[file] = record.model_copy(update={"run_dir": str(place)})
        if found.keys().isdisjoint(files):
            print(f"note: {path} holds no {RECORD_FILE}; left out", file=sys.stderr)
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
    paths = arguments.paths or ([output_dir] if output_dir.is_dir() else [])
    records = find_records(paths)
    if not records:
        places = ", ".join(map(short_path, arguments.paths or [output_dir]))
        fix = f"train first, or name runs: {COMMAND} FOLDER"
        raise UserError(f"no run record in {places}", fix=fix)
    comparisons = group_by_work(records)[: None if arguments.all else MAX_TABLES]
    left = len(records) - sum(len(comparison.records) for comparison in comparisons)
    note = f"left out: {left} older runs of other work; --all shows them" if left else ""
    about = describe_runs(records)
    parts = [about, *map(page.terminal, comparisons), note]
    print("\n\n".join(filter(None, parts)), flush=True)
    try:
        if arguments.html is not None:
            text = page.html("Training runs", about, page.sections(comparisons), note)
            arguments.html.write_text(text, encoding="utf-8")
            print(f"wrote {short_path(arguments.html)}")
        else:
            write_plots(comparisons, arguments.plots)
    except BrokenPipeError:  # of the terminal's reader
        raise
    except OSError as error:
        option = "--plots" if arguments.html is None else "--html"
        what = f"{arguments.html or arguments.plots} cannot be written"
        raise UserError(what, str(error), f"give another place to {option}") from None
    return 0


def write_plots(comparisons: Sequence[Comparison], folder: Path) -> None:
    """The plots of each work, in folders of their own where there are several."""
    from distributed_training.records.plots import save_pngs  # slow to import

    for number, comparison in enumerate(comparisons, 1):
        place = folder / str(number) if len(comparisons) > 1 else folder
        if drawn := save_pngs(comparison, place):
            print(f"wrote {short_path(place)}/{', '.join(path.name for path in drawn)}")
