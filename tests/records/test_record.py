import fcntl
import json
import math
import os
import platform
import time
from datetime import datetime, timezone

import pytest

from distributed_training.records.record import (
    LOST_PEER,
    METRICS_FILE,
    OWNER_FILE,
    RECORD_FILE,
    Record,
    append_metrics,
    git_commit,
    is_alive,
    load_record,
    mark_stopped,
    start_record,
    truncate_metrics,
    write_json,
)
from distributed_training.settings.files import ROOT
from tests.support import refused, start_test_record

pytestmark = pytest.mark.processes  # A new record names the commit, for which it runs git.


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[]", "record"),
        ('{"schema_version": 1}', "version"),
        ('{"schema_version": 2, "status": "ok"}', "started_at"),
        ('{"schema_version": 2,}', "JSON"),
    ],
)
def test_files_that_are_not_records_are_refused(text, word, tmp_path):
    (tmp_path / RECORD_FILE).write_text(text)
    with refused(str(tmp_path / RECORD_FILE), word):
        load_record(tmp_path)


def test_a_run_is_alive_while_a_process_holds_the_lock_of_its_folder(tmp_path):
    record = start_test_record(tmp_path)
    assert json.loads((tmp_path / RECORD_FILE).read_text()) == record.values
    state = load_record(tmp_path)
    assert (state.status, state.error, state.finished_at) == ("running", None, None)
    assert state.hostname == platform.node()
    assert datetime.fromisoformat(state.started_at).tzinfo == timezone.utc
    assert not is_alive(tmp_path)
    with open(tmp_path / OWNER_FILE, "w") as file:
        assert not is_alive(tmp_path)
        fcntl.flock(file, fcntl.LOCK_SH)
        assert is_alive(tmp_path)


def test_without_a_checkout_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setattr("distributed_training.records.record.ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_commit() is None


def test_metrics_are_appended_and_a_resumed_run_drops_the_rows_it_repeats(tmp_path):
    """A resumed run drops the rows of the steps that it repeats. It also drops lines that a power
    cut or a kill has damaged."""
    truncate_metrics(tmp_path, 2)
    assert list(tmp_path.iterdir()) == []
    append_metrics(tmp_path, [{"step": 1, "loss": 2.5}])
    broken = [b'{"step": 2, "lo', b"\0\0\0", b"\xff", b"", b"5", b"{}", b"[]", b'{"step": "1"}']
    with open(tmp_path / METRICS_FILE, "ab") as file:
        file.write(b"\n".join([*broken, b""]))
    append_metrics(tmp_path, [{"step": 2, "loss": 2.0}, {"step": 3, "loss": 1.5}])
    with open(tmp_path / METRICS_FILE, "ab") as file:
        file.write(b'{"step": 2, "lo')
    truncate_metrics(tmp_path, 2)
    rows = (tmp_path / METRICS_FILE).read_text()
    assert rows == '{"step":1,"loss":2.5}\n{"step":2,"loss":2.0}\n'
    assert [path.name for path in tmp_path.iterdir()] == [METRICS_FILE]


def test_the_record_of_a_diverged_run_is_valid_json(tmp_path):
    nan, inf = float("nan"), float("inf")
    start_record(tmp_path, loss_curve=[[1, nan], (2, 0.5)], memory={"peak": -inf})
    append_metrics(tmp_path, [{"step": 1, "loss": nan, "grad_norm": inf}])
    record, row = (
        json.loads((tmp_path / name).read_text(), parse_constant=pytest.fail)
        for name in (RECORD_FILE, METRICS_FILE)
    )
    assert record["loss_curve"] == [[1, None], [2, 0.5]]
    assert record["memory"] == {"peak": None}
    assert row == {"step": 1, "loss": None, "grad_norm": None}


def test_the_record_names_the_first_cause_of_a_failure(tmp_path):
    """The record must name the first cause, whichever rank writes last. A lost connection is no
    cause, and the launching process knows better."""

    def state():
        loaded = load_record(tmp_path)
        return loaded.status, loaded.error, loaded.step

    record = start_test_record(tmp_path)
    lost = f"rank 0 {LOST_PEER}: closed"
    assert not mark_stopped(tmp_path, "failed", lost, consequence=True)
    assert state() == ("failed", lost, 0)
    assert mark_stopped(tmp_path, "oom", "rank 2: no memory")
    assert not mark_stopped(tmp_path, "failed", "rank 1 saw nonsense")
    assert not mark_stopped(tmp_path, "failed", lost, consequence=True)
    record.update(step=3, status="interrupted")  # rank 0 updates the record later
    assert state() == ("oom", "rank 2: no memory", 3)
    assert load_record(tmp_path).finished_at is not None
    assert mark_stopped(tmp_path, "failed", "rank 1: killed", decides=True)
    assert state() == ("failed", "rank 1: killed", 3)
    record.update(status="ok")
    mark_stopped(tmp_path, "failed", "abort at exit", decides=True)
    assert state() == ("ok", None, 3)
    mark_stopped(tmp_path / "no such folder", "failed", "nobody sees it")


def test_the_record_of_an_earlier_attempt_is_not_changed(tmp_path):
    record = start_test_record(tmp_path)
    mark_stopped(tmp_path, "failed", "rank 1: killed")
    write_json(tmp_path / "plan.json", {"attempt_id": "second"})
    os.utime(tmp_path / "plan.json", (1, 1))  # clocks do not decide
    assert mark_stopped(tmp_path, "failed", "rank 1 cannot begin")
    assert load_record(tmp_path).error == "rank 1: killed"
    record.update(step=1)
    assert (load_record(tmp_path).status, load_record(tmp_path).error) == ("running", None)
    record.update(attempt_id="second")
    tomorrow = time.time() + 86400
    os.utime(tmp_path / "plan.json", (tomorrow, tomorrow))
    mark_stopped(tmp_path, "failed", "rank 0: killed")
    assert load_record(tmp_path).error == "rank 0: killed"


def test_every_published_record_loads():
    """All published records must load with the current schema and have consistent values."""
    documents = [json.loads(path.read_text()) for path in ROOT.glob("results/records/**/*.json")]
    published = [values for values in documents if "schema_version" in values]
    assert len(published) > 80
    records = [Record.model_validate(values) for values in published]
    for record, values in zip(records, published, strict=True):
        batch = record.batch
        batch_size = batch.micro_batch_size * batch.num_microbatches * batch.num_replicas
        assert batch_size == batch.global_batch_size
        assert math.prod(record.mesh.values()) == values["world_size"]
        samples = min(batch.global_batch_size, record.data["num_train_samples"])
        tokens = samples * values["config"]["max_length"] * record.data["real_token_share"]
        seconds = record.performance["step_time_s"]["p50"]
        assert record.performance["tokens_per_s"] * seconds == pytest.approx(tokens)
