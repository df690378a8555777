"""Find the records of runs and compare them on a terminal or as a page. This module implements the
command `report`."""

import argparse
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from distributed_training.records.display import short_name, short_path
from distributed_training.records.plots import draw_plots
from distributed_training.records.record import RECORD_FILE, Record, load_record
from distributed_training.records.results import (
    SETTINGS,
    Comparison,
    LayoutRow,
    Section,
    common_settings,
    differing_keys,
    render,
)
from distributed_training.settings.errors import UserError, print_stderr
from distributed_training.settings.files import check_replaced, plural, resolve_user_path

MAX_TABLES = 3
COMMAND = "python real_model_example.py report"
_KEYS_IN_SETTINGS = {"model", "dataset", "max_length", "precision"}


def build_sections(comparisons: Sequence[Comparison], *, has_plots: bool = True) -> list[Section]:
    """Return one section per comparison, by default with its plots. If there are several sections,
    headings and plot names are numbered."""
    sections = []
    for number, comparison in enumerate(comparisons, 1):
        is_numbered = len(comparisons) > 1
        settings = comparison.settings
        heading = settings.get("model", "Runs")
        plots = draw_plots(comparison.finished) if has_plots else {}
        section = Section(
            heading=f"{number}. {heading}" if is_numbered else heading,
            settings=settings,
            notes=comparison.notes,
            tables=comparison.tables(),
            plots={f"{n}-{number}" if is_numbered else n: png for n, png in plots.items()},
        )
        sections.append(section)
    return sections


def group_by_work(records: Sequence[Record]) -> list[Comparison]:
    """Group runs that did the same work into comparisons. The comparison that contains the newest
    run comes first. Each run has its own row."""
    records = sorted(records, key=lambda r: r.started_at)
    different_keys = differing_keys([record.work for record in records])
    groups: dict[str, list[Record]] = defaultdict(list)
    for r in reversed(records):
        groups[repr([r.work.get(key) for key in different_keys])].insert(0, r)
    comparisons = []
    for group in groups.values():
        common = common_settings(group)
        layouts = []
        for r in group:
            texts = [f"{Path(r.run_dir).name} {r.layout_name}"]
            texts += [f"{key} {show(r)}" for key, show in SETTINGS.items() if key not in common]
            layouts.append(LayoutRow(name=", ".join(texts), records=[r]))
        differing_settings = {
            key: short_name(str(group[0].work.get(key)))
            for key in different_keys
            if key not in _KEYS_IN_SETTINGS
        }
        comparisons.append(
            Comparison(layouts=layouts, differing_settings=differing_settings, row_heading="run")
        )
    return comparisons


def find_records(paths: Sequence[Path]) -> list[Record]:
    """Return the records in `paths`, without duplicates. Each path is a run, a folder of runs or a
    record file. Each record's `run_dir` is set to its actual location. Raises
    UserError for a file that is not a record."""
    records: dict[Path, Record] = {}
    for path in map(resolve_user_path, paths):
        if not path.exists():
            fix = "name a run, a folder of runs, or a record"
            raise UserError(f"{path} does not exist", fix=fix)
        files = [path]
        if path.is_dir():
            files = sorted([*path.glob(f"[!.]*/{RECORD_FILE}"), *path.glob("*.json")])
        for file in map(Path, map(os.path.realpath, files)):  # resolves the link runs/latest
            run_dir = file.parent if file.name == RECORD_FILE else file.with_suffix("")
            try:
                record = load_record(file)
            except UserError as error:
                if not path.is_dir():
                    raise
                if file.name == RECORD_FILE:  # a folder may contain other JSON files
                    print_stderr(f"note: {error}")
                continue
            records[file] = record.model_copy(update={"run_dir": str(run_dir)})
    return list(records.values())


def main(arguments: argparse.Namespace, output_dir: Path) -> int:
    """Show the runs that `arguments` name or, by default, all runs in `output_dir`, and write the
    HTML page. Return the exit code."""
    paths = arguments.paths or [output_dir]
    records = find_records(paths)
    if not records:
        what = f"There is no run record in {', '.join(map(short_path, paths))}"
        raise UserError(what, fix=f"train first, or name another folder. Run: {COMMAND} FOLDER")
    comparisons = group_by_work(records)[: None if arguments.all else MAX_TABLES]
    sections = build_sections(comparisons, has_plots=arguments.html is not None)
    heading = short_path(os.path.commonpath([r.run_dir for r in records]))
    if len(records) > 1:
        heading = f"{len(records)} runs in {heading}"
    note = ""
    if num_hidden := len(records) - sum(len(comparison.records) for comparison in comparisons):
        hidden_text = plural(num_hidden, "older run")
        note = f"Not shown: {hidden_text} with other settings. To show all runs, add --all."
    page = ("Training runs", heading, sections, note)
    print(render("txt", *page), flush=True)
    if html := arguments.html:
        check_replaced(html.parent, "name another --html", html.name)
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(render("html", *page), encoding="utf-8")
        print(f"Wrote {short_path(html)}.")
    return 0
