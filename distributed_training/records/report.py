"""Find the records of runs and compare them on a terminal or as a page. This module implements the
command `report`."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from distributed_training.records.display import short_path
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

MAX_RUNS = 20
COMMAND = "python real_model_example.py report"
_KEYS_IN_SETTINGS = {"model", "dataset", "max_length", "precision"}


def build_sections(comparisons: Sequence[Comparison], *, has_plots: bool = True) -> list[Section]:
    """Return one section per comparison, by default with its plots."""
    return [
        Section(
            heading=comparison.settings.get("model", "Runs"),
            settings=comparison.settings,
            notes=comparison.notes,
            tables=comparison.tables(),
            plots=draw_plots(comparison.finished) if has_plots else {},
            verdict=comparison.verdict,
        )
        for comparison in comparisons
    ]


def compare_runs(records: Sequence[Record]) -> Comparison:
    """Return a comparison with one row per run, from oldest to newest. The name of a row contains
    the settings in which the runs differ."""
    records = sorted(records, key=lambda r: r.started_at)
    common = common_settings(records)
    keys = differing_keys([record.work for record in records])
    # Prefer settings that were requested to settings that follow from them.
    requested = differing_keys([record.config_requested for record in records])
    keys = [key for key in keys if key in requested] or keys
    layouts = []
    for r in records:
        texts = [f"{Path(r.run_dir).name} {r.layout_name}"]
        texts += [f"{key} {show(r)}" for key, show in SETTINGS.items() if key not in common]
        texts += [f"{key} {r.work.get(key)}" for key in keys if key not in _KEYS_IN_SETTINGS]
        layouts.append(LayoutRow(name=", ".join(texts), records=[r]))
    return Comparison(layouts=layouts, row_heading="run")


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
    shown = sorted(records, key=lambda r: r.started_at)[0 if arguments.all else -MAX_RUNS :]
    sections = build_sections([compare_runs(shown)], has_plots=arguments.html is not None)
    heading = short_path(os.path.commonpath([r.run_dir for r in records]))
    if len(records) > 1:
        heading = f"{len(records)} runs in {heading}"
    note = ""
    if num_hidden := len(records) - len(shown):
        note = f"Not shown: {plural(num_hidden, 'older run')}. To show all runs, add --all."
    page = ("Training runs", heading, sections, note)
    print(render("txt", *page), flush=True)
    if html := arguments.html:
        check_replaced(html)
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(render("html", *page), encoding="utf-8")
        print(f"Wrote {short_path(html)}.")
    return 0
