"""Runs side by side on a terminal."""

from __future__ import annotations

import platform

import pytest

from distributed_training.records.compare import comparison, group_by_work, run_names, status
from tests.support import made_record


def one_work(*changes):
    """The only work of records with these changes."""
    (work,) = group_by_work([made_record(**change) for change in changes])
    return work


def test_equal_work_is_one_table_in_the_order_of_the_starts():
    starts = ["2026-01-03", "2026-01-01", "2026-01-02"]
    names = ("zero2", "fsdp", "dp")
    work = one_work(
        *({"started_at": s, "strategy__name": n} for s, n in zip(starts, names, strict=True))
    )
    assert work.columns()["strategy"] == ["fsdp", "dp", "zero2"]
    assert work.differs == ""


def test_the_order_of_keys_is_not_work():
    work = made_record().work
    reverse = made_record(work=dict(reversed(work.items())))
    assert len(group_by_work([made_record(), reverse])) == 1


def test_other_work_is_another_table_the_newest_first_that_says_how_it_differs():
    records = [
        made_record(),
        made_record(work__seed=7, work__global_batch_size=64, started_at="2026-02-01"),
        made_record(strategy__name="dp"),
    ]
    newest, oldest = group_by_work(records)
    assert newest.differs == "seed 7, global_batch_size 64"
    assert oldest.differs == "seed 42, global_batch_size 32"
    assert oldest.columns()["strategy"] == ["zero2", "dp"]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"seed": 7}, "seed 42"),
        ({"seed": None, "model": "gpt2"}, "seed 42"),  # the model is said in any case
        ({"data_fingerprint": "0123456789abcdef"}, "data_fingerprint None"),
        ({"data_fingerprint": "0123456789abcdef", "seed": 7}, "seed 42"),
    ],
)
def test_what_tells_works_apart_is_named_once(other, said):
    work = made_record().work
    first, _ = group_by_work(
        [made_record(), made_record(work={**work, **other}, started_at="2025")]
    )
    assert first.differs == said


def test_what_all_runs_share_stands_above_and_what_differs_in_columns():
    work = one_work({"run_dir": "a-1"}, {"run_dir": "a-2", "config__precision": "fp32"})
    assert work.settings == {
        "model": "gpt2-medium", "processes": "4", "batch": "4 x 512", "compile": "yes",
        "dataset": "wikitext-2",
    }  # fmt: skip
    columns = work.columns()
    assert columns["run"] == ["1", "2"]
    assert columns["precision"] == ["bf16", "fp32"]
    assert columns["peak GPU memory"] == ["12.00 GiB"] * 2
    assert "bubble" not in columns, "nothing here has a pipeline"
    assert not {"model", "processes", "batch", "compile"} & set(columns)


def test_what_no_run_has_measured_has_no_column():
    gone = {"memory__peak_reserved_bytes": None, "performance__mfu": None}
    assert {"peak GPU memory", "MFU"}.isdisjoint(one_work(gone, gone).columns())
    assert one_work(gone, {}).columns()["MFU"] == ["-", "31.4%"]


def test_the_perplexity_of_an_untrained_model_is_no_result():
    start = {"evaluations": [{"step": 0, "loss": 3.5, "perplexity": 33.0}]}
    assert "perplexity" not in one_work(start).columns()
    assert one_work(start, {}).columns()["perplexity"] == ["-", "20.1"]


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({}, "ok"),
        ({"status": "interrupted", "step": 12}, "interrupted 12/64"),
        ({"status": "failed", "step": 0}, "failed 0/64"),
        ({"status": "running", "step": 3, "hostname": "elsewhere"}, "running 3/64"),
        ({"status": "running", "step": 3, "hostname": platform.node(), "pid": None}, "killed 3/64"),
    ],
)
def test_a_run_that_did_not_end_says_how_far_it_came(changes, shown):
    assert status(made_record(**changes)) == shown


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["20260101-010101-dp-x1", "20260101-020202-dp-x1"], ["010101", "020202"]),
        (["20260101-010101-dp-x1", "20260102-010101-dp-x1"], ["20260101", "20260102"]),
        (["20260101-1-dp-x1", "20260102-1-dp-x1", "20260102-2-dp-x1"],
         ["20260101-1", "20260102-1", "20260102-2"]),
        (["20260101-1-dp-x1", "20260101-1-dp-x1-2"], ["", "2"]),
        (["a-1", "a-1"], ["a-1", "a-1"]),
        (["one"], ["one"]),
    ],
)  # fmt: skip
def test_runs_are_named_by_what_tells_their_folders_apart(folders, names):
    assert run_names([made_record(run_dir=f"runs/{name}") for name in folders]) == names


@pytest.mark.parametrize("width", [80, 200])
def test_a_table_fits_the_terminal(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    mesh = {"pp": 2, "dp_replicate": 1, "dp_shard": 1, "tp": 2}
    pipeline = {"schedule": "1f1b", "num_microbatches": 8, "ideal_bubble": 0.1}
    records = [
        made_record(mesh=mesh, pipeline=pipeline, bubble={"idle_share": 0.2}, run_dir="runs/1-a"),
        made_record(status="interrupted", step=50, run_dir="runs/2-b", error="x " * 200),
    ]
    text = comparison(group_by_work(records))
    assert max(map(len, text.splitlines())) <= width
    assert ("host" in text) == (width == 200)
    assert "interrupted 50/64" in text
