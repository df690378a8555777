"""Test the columns of the documents' tables."""

import json

from distributed_training.records.record import load_record
from distributed_training.settings.files import ROOT
from results.lab.pages.columns import COLUMNS, table


def test_every_published_record_fills_a_row():
    files = [path for path in ROOT.glob("results/records/**/*.json") if is_run(path)]
    assert len(files) > 80
    records = [load_record(path) for path in files]
    assert len(table(records, list(COLUMNS)).splitlines()) == len(records) + 2


def is_run(path):
    return "schema_version" in json.loads(path.read_text())
