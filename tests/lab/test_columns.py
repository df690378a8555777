"""Test table columns that no generated document covers."""

import json

from distributed_training.records.record import load_record
from distributed_training.settings.files import ROOT
from results.lab.pages.columns import COLUMNS, table
from tests.support import made_record


def cells(text):
    """Return each row of a Markdown table as a dictionary from column names to cells."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert set("".join(lines[1])) == {"-"}
    return [dict(zip(lines[0], row, strict=True)) for row in lines[2:]]


def one_row(columns=tuple(COLUMNS), **changes):
    (row,) = cells(table([made_record(**changes)], columns))
    return row


def test_columns_without_a_measurement_are_empty():
    row = one_row(finished=False, status="oom", disk=None)
    known = {"strategy", "model", "processes", "batch", "precision", "compile", "CUDA graph"}
    known |= {"compression", "trains", "recomputes", "dataset", "steps", "status"}
    assert {column for column, text in row.items() if text != "-"} == known
    assert (row["status"], row["steps"]) == ("oom", "0 of 64")
    lost = {"step": 9, "loss": None, "perplexity": None}
    row = one_row(loss_curve=[[1, 3.5], [2, None]], evaluations=[lost])
    assert (row["training loss"], row["validation perplexity"]) == ("nan", "nan")


def test_memory_excludes_earlier_runs_and_disk_traffic_excludes_logging():
    ranks = [{"peak_reserved_bytes": 3 * 2**30, "left_over_bytes": 2**30} for _ in range(2)]
    disk = {"read_bytes": 0, "write_bytes": 64 * 50_000_000, "num_steps": 64}
    row = one_row(memory__by_rank=ranks, disk=disk)
    assert row["GPU memory by rank"] == "2.0, 2.0 GiB"
    assert row["disk per step"] == "0.0 GB read, 0.1 GB written"
    disk["write_bytes"] -= 64
    assert one_row(disk=disk)["disk per step"] == "none"


def test_every_published_record_fills_a_row():
    files = [path for path in ROOT.glob("results/records/**/*.json") if is_run(path)]
    assert len(files) > 80
    records = [load_record(path) for path in files]
    assert len(table(records, list(COLUMNS)).splitlines()) == len(records) + 2


def is_run(path):
    return "schema_version" in json.loads(path.read_text())
