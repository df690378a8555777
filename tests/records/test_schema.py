"""What was published, and what version 1 wrote, loads as the schema says."""

from __future__ import annotations

import json
import math

import pytest

from distributed_training.records.record import Record, load_record
from distributed_training.settings.files import ROOT
from results.lab.pages.columns import COLUMNS, table
from tests.support import record_values

PUBLISHED = {
    path: values
    for path in sorted((ROOT / "results" / "records").rglob("*.json"))
    if "schema_version" in (values := json.loads(path.read_text()))
}


def test_every_published_record_loads_and_fills_a_table():
    assert len(PUBLISHED) > 80
    records = [load_record(path) for path in PUBLISHED]
    for record, values in zip(records, PUBLISHED.values(), strict=True):
        batch = record.batch
        cut = batch.micro_batch_size * batch.num_microbatches * batch.num_replicas
        assert cut == batch.global_batch_size
        assert math.prod(record.mesh.values()) == values["world_size"]
        samples = min(batch.global_batch_size, record.data["num_train_samples"])
        tokens = samples * values["config"]["max_length"] * record.data["real_token_share"]
        seconds = record.performance["step_time_s"]["p50"]
        assert record.performance["tokens_per_s"] * seconds == pytest.approx(tokens)
    assert len(table(records, list(COLUMNS)).splitlines()) == len(records) + 2


def test_version_1_is_read_by_its_names_and_nothing_is_lost():
    old = record_values(schema_version=1, of_then=[1])
    old["topology"] = {"dp_replicate": 1, "dp_shard": 4}  # the earliest had no tp and pp
    batch = old["batch"]
    batch["grad_accum_steps"], batch["dp_size"] = (
        batch.pop(name) for name in ("num_microbatches", "num_replicas")
    )
    del old["mesh"]
    record = Record.model_validate(old)
    assert record.mesh == {"pp": 1, "dp_replicate": 1, "dp_shard": 4, "tp": 1}
    assert (record.batch.num_microbatches, record.batch.num_replicas) == (2, 4)
    assert Record.model_validate_json(record.model_dump_json()).of_then == [1]
