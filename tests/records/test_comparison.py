"""Test which runs are grouped as comparable, and what comparison tables contain."""

import platform

import pytest

from distributed_training.records.report import compare_runs
from distributed_training.records.results import (
    LayoutRow,
    build_columns,
    describe_problems,
    describe_settings,
    find_verdict,
)
from tests.support import made_record


def seeded(seed, speed, **changes):
    """Return a record with two evaluations and a loss curve that depends on the
    seed."""
    curve = [[step, 4 - step / 10 - seed / 100] for step in range(1, 5)]
    evaluations = [{"step": step, "loss": 3.0 + seed, "perplexity": 20.0} for step in (0, 4)]
    return made_record(
        work__seed=seed, performance__tokens_per_s=speed, loss_curve=curve,
        evaluations=evaluations, **changes,
    )  # fmt: skip


@pytest.fixture
def four_layouts():
    """Return four layouts, of which two have finished runs."""
    return [
        LayoutRow(name="zero2", record=seeded(1, 120_000.0)),
        LayoutRow(name="dp", record=seeded(0, 50_000.0)),
        LayoutRow(name="tp", why="16 heads <&> 3 processes"),
        LayoutRow(name="pp"),
    ]


def rows_of(layouts):
    """Return the table of these layouts as a dictionary from row names to rows. Each row is a
    dictionary from headings to cells."""
    columns = build_columns(layouts)
    rows = zip(*columns.values(), strict=True)
    return {row[0]: dict(zip(columns, row, strict=True)) for row in rows}


def test_rows_of_a_report_are_oldest_first_and_name_what_differs():
    work = made_record().work
    records = [
        made_record(run_dir="a-1", started_at="2026-01-03", config__precision="fp32"),
        made_record(run_dir="a-2", work__seed=7, started_at="2026-02"),
        made_record(run_dir="a-3", started_at="2026-01-01", strategy__name="dp"),
        made_record(run_dir="a-4", started_at="2026-01-02", work=dict(reversed(work.items()))),
    ]
    settings = describe_settings(records)
    assert "batch 4 x 512" in settings
    assert "precision" not in settings
    rows = rows_of(compare_runs(records))
    names = ["a-3 dp, seed 42", "a-4 zero2, seed 42", "a-1 zero2, seed 42"]
    assert list(rows) == [*names, "a-2 zero2, seed 7"]
    assert rows[names[0]]["reserved GPU memory"] == "12.00 GiB"
    other = made_record(work={**work, "data_fingerprint": "0123456789abcdef"}, started_at="2027")
    layouts = compare_runs([made_record(), other])
    assert "data_fingerprint 0123456789abcdef" in list(rows_of(layouts))[1]
    assert "data_fingerprint" in find_verdict(layouts)


def test_an_unfinished_run_shows_its_last_step():
    def status(**changes):
        return LayoutRow(name="dp", record=made_record(**changes)).status

    here = {"status": "running", "hostname": platform.node(), "step": 3}
    assert status(status="interrupted", step=12) == "interrupted 12/64"
    assert status(**here) == "killed 3/64"
    assert status(**{**here, "hostname": "elsewhere"}) == "running 3/64"


def test_rows_show_results_and_the_verdict_names_the_fastest(four_layouts):
    rows = rows_of(four_layouts)
    assert rows["zero2"]["tokens/s"] == "120,000"
    assert rows["zero2"]["validation loss"] == "4.0000"
    assert rows["dp"]["tokens/s"] == "50,000"
    assert [row["status"] for row in rows.values()] == ["ok", "ok", "failed", "not run yet"]
    assert describe_problems(four_layouts) == ["tp failed: 16 heads <&> 3 processes"]
    verdict = find_verdict(four_layouts)
    for text in ("zero2", "120,000", "2.4 times dp", "64 steps"):
        assert text in verdict
    four_layouts[1].record.work["global_batch_size"] = 7
    assert "global_batch_size" in find_verdict(four_layouts)


def test_an_overfitted_run_is_reported():
    evaluations = [{"step": step, "loss": loss} for step, loss in ((0, 9.0), (20, 3.0), (40, 3.2))]
    (note,) = describe_problems(compare_runs([made_record(evaluations=evaluations)]))
    assert "overfitted" in note
