"""Find the records of runs and compare them in tables. This module implements the command
`report`."""

import argparse
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path

from distributed_training.records.display import fold, short_name, short_path
from distributed_training.records.record import RECORD_FILE, Record, load_record
from distributed_training.records.results import (
    LayoutRow,
    build_columns,
    describe_problems,
    describe_settings,
    differing_keys,
    find_verdict,
    format_table,
)
from distributed_training.settings.errors import UserError, describe, print_stderr, printable
from distributed_training.settings.files import IS_INSTALLED, plural, resolve_user_path

COMMAND = f"{'trainplan' if IS_INSTALLED else 'python real_model_example.py'} report"
_SETTINGS_WIDTH = 60  # maximum length of the settings in the name of a row, in characters
_KEYS_IN_NAME = {"strategy", "output_dir"}  # the name of a row shows their values anyway


def render(heading: str, layouts: Sequence[LayoutRow]) -> str:
    """Return the table and notes of a comparison as text for a terminal."""
    verdict = find_verdict(layouts)
    settings = describe_settings([layout.record for layout in layouts if layout.record])
    lines = [fold(heading), ""]
    lines += [fold(text) for text in (verdict, settings) if text]
    lines.append(format_table(build_columns(layouts)))
    lines += map(fold, describe_problems(layouts))
    return "\n".join(map(printable, "\n".join(lines).splitlines()))


def compare_runs(records: Sequence[Record]) -> list[LayoutRow]:
    """Return one row per run, from oldest to newest. The name of a row contains
    the first settings in which the runs differ, of those that were requested if there are any."""
    records = sorted(records, key=lambda r: r.started_at)
    requested = differing_keys([record.config_requested for record in records])
    keys = [key for key in requested if key not in _KEYS_IN_NAME]
    keys = keys or differing_keys([record.work for record in records])
    layouts = []
    for r in records:
        name = f"{Path(r.run_dir).name} {r.layout_name}"
        if keys:
            values = {**r.work, **r.config_requested}
            settings = ", ".join(f"{key} {short_name(str(values.get(key)))}" for key in keys)
            settings = textwrap.shorten(settings, _SETTINGS_WIDTH, placeholder=" ...")
            name = f"{name}, {settings}"
        layouts.append(LayoutRow(name=name, record=r))
    return layouts


def find_records(paths: Sequence[Path]) -> list[Record]:
    """Return the records in `paths`, without duplicates. Each path is a run, a folder of runs or a
    record file. Each record's `run_dir` is set to its actual location. Raises
    UserError for a file that is not a record."""
    records = {}
    for path in map(resolve_user_path, paths):
        if not path.exists():
            fix = "name a run, a folder of runs, or a record"
            raise UserError(f"{path} does not exist", fix=fix)
        files = [path]
        if path.is_dir():
            files = sorted([*path.glob(f"[!.]*/{RECORD_FILE}"), *path.glob("*.json")])
        for file in map(Path, map(os.path.realpath, files)):  # resolves the link runs/latest
            try:
                record = load_record(file)
                _check_values(record)
                records[file] = record
            except UserError as error:
                if not path.is_dir():
                    raise
                if file.name == RECORD_FILE:  # a folder may contain other JSON files
                    print_stderr(f"note: {error}")
    return list(records.values())


def _check_values(record: Record) -> None:
    """Raise UserError if the tables cannot show a record, because one wrong value would hide all
    other runs."""
    other = record.model_copy(update={"run_dir": ""})  # tables of two runs read more values
    try:
        render("", compare_runs([record, other]))
    except Exception as error:  # each value may have any type
        what = f"record {record.run_dir}/{RECORD_FILE} contains a value that cannot be shown"
        raise UserError(what, describe(error)) from None


def main(arguments: argparse.Namespace, output_dir: Path) -> int:
    """Show the runs that `arguments` name or, by default, all runs in `output_dir`. Return the exit
    code."""
    paths = arguments.paths or [output_dir]
    records = find_records(paths)
    if not records:
        what = f"There is no run record in {', '.join(map(short_path, paths))}"
        raise UserError(what, fix=f"train first, or name another folder. Run: {COMMAND} FOLDER")
    folder = short_path(os.path.commonpath([r.run_dir for r in records]))
    heading = f"{plural(len(records), 'run')} in {folder}"
    print(render(heading, compare_runs(records)), flush=True)
    return 0
