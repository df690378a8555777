"""The page of `compare`: its figures are the records'."""

from __future__ import annotations

import statistics

import pytest

from distributed_training.records.plots import as_svgs
from distributed_training.records.side_by_side import (
    Comparison,
    Layout,
    all_tables,
    html,
    markdown,
    screen,
)
from distributed_training.records.side_plots import build_figures
from tests.records.test_page import Page
from tests.support import made_record

PREDICTION = {
    "fits": True,
    "peak_bytes": 9 * 2**30,
    "memory_bytes": {"parameters": 2**30, "gradients": 0, "activations": 8 * 2**30},
    "host_bytes": 2**30,
    "step_time_s": 0.15,
    "tokens_per_s": 1e5,
    "bound_by": "network",
    "sent_bytes": {"dp_shard": 3 * 2**20, "pp": 0},
}
SPEEDS = (100_000.0, 140_000.0)


def record(seed, speed, **changes):
    curve = [[step, 4 - step / 10 - seed / 100] for step in range(1, 5)]
    evaluations = [{"step": step, "loss": 3.0 + seed, "perplexity": 20.0} for step in (0, 4)]
    return made_record(
        work__seed=seed, performance__tokens_per_s=speed, prediction=PREDICTION, loss_curve=curve,
        loss_seconds=[0.5, 1.0, 1.5, 2.0], evaluations=evaluations, **changes,
    )  # fmt: skip


@pytest.fixture
def comparison():
    runs = [record(seed, speed) for seed, speed in enumerate(SPEEDS)]
    layouts = [
        Layout(name="zero2", records=runs, num_runs=2),
        Layout(name="dp", records=[record(0, 50_000.0)], num_runs=2),
        Layout(name="tp", records=[], num_runs=2, why="16 heads <&> 3 processes"),
    ]
    return Comparison(work="model gpt2-medium", layouts=layouts)


def cells(comparison, title):
    """strategy -> heading -> cell of one table."""
    table = next(table for table in all_tables(comparison) if table.title == title)
    return {row[0]: dict(zip(table.headers, row, strict=True)) for row in table.rows}


def test_means_and_spreads_are_those_of_the_runs(comparison):
    rows = cells(comparison, "Results")
    mean, spread = statistics.fmean(SPEEDS), statistics.stdev(SPEEDS)
    assert rows["zero2"]["tokens/s"] == f"{mean:,.0f} ± {spread:,.0f}"
    assert rows["zero2"]["validation loss"] == "3.5000 ± 0.7071"
    assert rows["dp"]["tokens/s"] == "50,000"
    assert [row["ended"] for row in rows.values()] == ["ok", "1 of 2 not run yet", "failed"]


def test_predictions_stand_beside_what_was_measured(comparison):
    row = cells(comparison, "Prediction and measurement")["zero2"]
    assert list(row.values()) == [
        "zero2", "125.0 ± 0.0", "150.0", "+20%", "10.00 GiB", "9.00 GiB", "-10%", "network",
    ]  # fmt: skip
    memory = cells(comparison, "Memory by component")["zero2"]
    assert list(memory) == ["strategy", "parameters", "activations", "in all"]
    assert memory["in all"] == "9.00 GiB"
    assert cells(comparison, "Bytes sent a step")["dp"] == {
        "strategy": "dp", "over dp_shard": "3.00 MiB", "in all": "3.00 MiB",
    }  # fmt: skip


def test_without_a_gpu_memory_is_a_process_s_ram():
    on_cpu = record(0, 1.0, machine__gpu_name=None, memory__peak_allocated_bytes=None)
    layouts = [Layout(name="dp", records=[on_cpu], num_runs=1)]
    comparison = Comparison(work="", layouts=layouts)
    row = cells(comparison, "Prediction and measurement")["dp"]
    assert (row["peak measured"], row["peak off"]) == ("5.00 GiB", "-80%")
    assert cells(comparison, "Memory by component")["dp"]["in all"] == "1.00 GiB"


def test_pages_need_no_other_file_and_say_why_a_strategy_failed(comparison):
    page = Page(html("3 of 6 runs", [comparison]))
    assert page.open == ["html"]
    assert [link for link in page.links if not link.startswith("#")] == []
    assert page.figures == ["loss-by-step", "loss-by-time", "throughput", "memory", "sent"]
    assert "16 heads &lt;&amp;&gt; 3 processes" in html("", [comparison])
    text = markdown("", [comparison], [[]])
    assert "tp failed: 16 heads <&> 3 processes" in text
    assert text.count("\n| zero2") == len(page.tables) == 4
    shown = screen(comparison).splitlines()
    assert max(map(len, shown)) <= 80
    assert "120,000 ± 28,284" in shown[1]


def test_runs_of_other_work_are_not_passed_off_as_equal(comparison):
    comparison.layouts[1].records[0].work["global_batch_size"] = 7
    assert "they differ in global_batch_size" in markdown("", [comparison], [[]])


def test_curves_are_means_over_the_seeds_and_bars_the_predicted_bytes(comparison):
    figures = build_figures(comparison)
    steps, times = (figures[f"loss-by-{kind}"].axes[0].lines for kind in ("step", "time"))
    assert [line.get_label() for line in steps] == ["zero2", "dp"]
    assert steps[0].get_ydata().tolist() == pytest.approx([3.895, 3.795, 3.695, 3.595])
    assert times[0].get_xdata().tolist() == [0.5, 1.0, 1.5, 2.0]
    ends = [bar.get_x() + bar.get_width() for bar in figures["memory"].axes[0].patches]
    assert max(ends) == pytest.approx(9)
    marks = figures["memory"].axes[0].lines[0].get_xdata()
    assert list(marks) == [10, 10]
    assert len(as_svgs(lambda: figures, "here")) == 5
