"""Run records -> comparison tables and plots, and documents that cannot drift from them.

    python real_model_example.py report [RUN ...]                 tables, plots in report/
    python real_model_example.py report --write TRAINING_RESULTS.md README.md
    python real_model_example.py report --check TRAINING_RESULTS.md README.md

Documents hold cog blocks that call `published_table` and `published_json`; --write is `cog -r`, and
draws the figures that they show.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from cogapp import Cog
from cogapp.cogapp import CogCheckFailed, CogError

from distributed_training.records.compare import (
    MAX_TABLES,
    Work,
    comparison,
    describe_runs,
    group_by_work,
)
from distributed_training.records.display import short_path
from distributed_training.records.record import RECORD_FILE, Record, load_record
from distributed_training.records.tables import COLUMNS, DEFAULT, markdown_table, table
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import ROOT, did_you_mean, given_path, load_json
from distributed_training.settings.parser import Parser
from distributed_training.settings.strategies import list_strategies

RECORDS_DIR = ROOT / "results" / "records"
COMMAND = "python real_model_example.py report"


def published_table(
    name: str,
    columns: str = ", ".join(DEFAULT),
    where: Mapping[str, Any] | None = None,
    without: Mapping[str, Any] | None = None,
) -> str:
    """A document's table of results/records/<name>/*.json whose CONFIG has all of `where` and none
    of `without`, by model and strategy. Raises UserError for a word that selects nothing.
    """
    order, words = list(list_strategies()), columns.split(", ")
    records = [load_record(path) for path in sorted((RECORDS_DIR / name).glob("*.json"))]
    if not records:
        raise UserError(f"{RECORDS_DIR / name} holds no records", fix=f"see {RECORDS_DIR}")
    records.sort(key=lambda r: (r.config["precision"], r.started_at))
    records.sort(key=lambda r: (r.num_parameters, order.index(r.strategy["name"])))
    _check_words(name, "column", words, COLUMNS)
    for conditions, wanted in ((where or {}, True), (without or {}, False)):
        _check_words(name, "key", conditions, records[0].config)
        for key, value in conditions.items():
            kept = [r for r in records if (r.config.get(key) == value) is wanted]
            if not kept or (not wanted and len(kept) == len(records)):
                raise UserError(f"{name}: {key}={value!r} selects nothing", fix="correct the value")
            records = kept
    return f"\n{table(records, words)}\n"  # Markdown needs the blank lines


def published_json(file: str, key: str, columns: str) -> str:
    """A document's table of one entry of any published JSON: a row per key, a column per key of its
    value. Raises UserError for words that the file does not have."""
    entries = load_json(RECORDS_DIR / file, "record")
    words, rows = columns.split(", "), []
    _check_words(file, "key", [key], [k for k, entry in entries.items() if isinstance(entry, dict)])
    for row, value in entries[key].items():
        values = value if isinstance(value, dict) else dict.fromkeys(words[:1], value)
        _check_words(f"{file}, {row}", "column", words, values)
        rows.append([row, *(_figure(values[word]) for word in words)])
    return markdown_table(rows, ["", *words])


def published_operations(file: str) -> str:
    """A document's table of who uses which operation between processes: KiB that the process which
    sends most sends in the counted step, of the first case of each strategy."""
    cases = load_json(RECORDS_DIR / file, "record")["cases"]
    found: dict[str, dict[str, float]] = {}
    for name, case in cases.items():
        strategy, most = name.split()[0], dict[str, float]()
        for rank in case["ranks"]:
            sent: dict[str, float] = {}  # over all axes of the mesh
            for key, counts in rank["counted"].items():
                kind = key.split()[-1].replace("_", "-")
                sent[kind] = sent.get(kind, 0.0) + counts["sent_bytes"]
            most = {kind: max(most.get(kind, 0.0), sent.get(kind, 0.0)) for kind in most | sent}
        found.setdefault(strategy, most)
    kinds = sorted({kind for most in found.values() for kind in most})
    rows = [
        [kind, ", ".join(f"{name} {most[kind] / 2**10:,.0f}" for name, most in found.items()
                         if most.get(kind, 0) >= 2**10)]
        for kind in kinds
    ]  # fmt: skip
    return markdown_table(rows, ["operation", "sent a step, KiB"])


def published_samples(name: str) -> str:
    """A document's list of results/records/<name>/*.json: perplexity at the first and the best
    evaluation, minutes, and what each model wrote before and after, line breaks and repeated spaces
    left out."""
    lines = []
    for path in sorted((RECORDS_DIR / name).glob("*.json")):
        r = load_record(path)
        first, best = r.evaluations[0]["perplexity"], r.best or r.evaluations[-1]
        began, ended = map(datetime.fromisoformat, (r.started_at, r.finished_at or r.started_at))
        minutes = (ended - began).total_seconds() / 60
        lines += [
            f"- `{path.stem[2:]}`: perplexity {first:,.0f} before, {best['perplexity']:.1f} after "
            f"{best['step']:,} steps; {minutes:.1f} minutes in all. Before and after it wrote:",
            f"  > {' '.join(str(r.sample_before).split())}",
            "",
            f"  > {' '.join(str((r.model_extra or {})['sample']).split())}",
        ]
    return "\n" + "\n".join(lines) + "\n"


def published_links(*files: str, over: str = "") -> str:
    """A document's table of what `links` found over that group of each file, or its first: fitted
    latency in microseconds, and GB/s."""
    records = {Path(file).stem: load_json(RECORDS_DIR / file, "record") for file in files}
    groups = {
        name: record["groups"][over or next(iter(record["groups"]))]
        for name, record in records.items()
    }
    rows = [
        [kind.replace("_", "-")] + [
            f"{1e6 * group['operations'][kind]['latency_s']:,.0f} us, "
            f"{group['operations'][kind]['bytes_per_s'] / 1e9:.2f}"
            for group in groups.values()
        ]
        for kind in next(iter(groups.values()))["operations"]
    ]  # fmt: skip
    return markdown_table(rows, ["", *groups])


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3f}" if abs(value) >= 0.1 else f"{value:.1e}"


def _check_words(where: str, what: str, words: Iterable[str], known: Collection[str]) -> None:
    for word in set(words).difference(known):
        what, why = f"{where}: the {what} {word!r} is not known", f"known are {', '.join(known)}"
        raise UserError(what, why, did_you_mean(word, known))


def run_cog(option: str, documents: Sequence[Path]) -> None:
    """`cog -r` (write) or `cog --check`. Raises UserError for a document that differs from its
    records or cannot be read, or a block that cannot be filled."""
    names = " ".join(map(str, documents))
    try:
        Cog().callable_main(["cog", option, "--verbosity=1", *map(str, documents)])
    except CogCheckFailed:
        what, fix = "documents differ from results/records", f"type: {COMMAND} --write {names}"
        raise UserError(what, fix=fix) from None
    except CogError as error:
        cause = error.__context__
        text = str(cause if isinstance(cause, UserError) else error).splitlines()[-1]
        raise UserError(f"a block of {names} fails", text) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{names} cannot be read or written", str(error)) from None


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
    add("paths", nargs="*", type=Path, help="runs, folders of runs, records or, to fill, documents")
    add("--all", action="store_true", help=f"every kind of work, not the newest {MAX_TABLES}")
    add("--plots", type=Path, default=Path("report"), help="folder for the plots")
    add("--html", type=Path, metavar="FILE", help="tables and plots in one page instead")
    add("--write", action="store_true", help="fill generated parts of documents")
    add("--check", action="store_true", help="fail when documents are out of date")
    arguments = parser.parse_args(argv)
    if (arguments.write or arguments.check) and arguments.paths:
        from distributed_training.records.figures import keep_figures  # slow to import

        run_cog("-r" if arguments.write else "--check", arguments.paths)
        plots = RECORDS_DIR.with_name("plots")
        keep_figures(arguments.paths, RECORDS_DIR, plots, write=arguments.write)
        return 0
    records = find_records(arguments.paths or [output_dir] * output_dir.is_dir())
    if not records:
        places = ", ".join(map(short_path, arguments.paths or [output_dir]))
        fix = f"train first, or name runs: {COMMAND} FOLDER"
        raise UserError(f"no run record in {places}", fix=fix)
    works = group_by_work(records)[: None if arguments.all else MAX_TABLES]
    left = len(records) - sum(len(work.records) for work in works)
    note = f"left out: {left} older runs of other work; --all shows them" if left else ""
    about = describe_runs(records)
    print("\n\n".join(filter(None, (about, comparison(works), note))), flush=True)
    try:
        if arguments.html is not None:
            from distributed_training.records.page import build_page  # slow to import

            arguments.html.write_text(build_page(about, works, note), encoding="utf-8")
            print(f"wrote {short_path(arguments.html)}")
        else:
            write_plots(works, arguments.plots)
    except BrokenPipeError:  # of the terminal's reader
        raise
    except OSError as error:
        option = "--plots" if arguments.html is None else "--html"
        what = f"{arguments.html or arguments.plots} cannot be written"
        raise UserError(what, str(error), f"give another place to {option}") from None
    return 0


def write_plots(works: Sequence[Work], folder: Path) -> None:
    """The plots of each work, in folders of their own where there are several."""
    from distributed_training.records.plots import draw_plots  # slow to import

    for number, work in enumerate(works, 1):
        place = folder / str(number) if len(works) > 1 else folder
        if drawn := draw_plots(work.records, place):
            print(f"wrote {short_path(place)}/{', '.join(path.name for path in drawn)}")
