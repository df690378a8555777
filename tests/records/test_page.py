"""The page of comparisons, on a terminal and as HTML read back by a parser."""

from __future__ import annotations

import re

import pytest

from distributed_training.records.report import build_sections, html, markdown, terminal
from distributed_training.records.tables import group_by_work
from tests.records.test_comparison import over_seeds  # noqa: F401
from tests.support import made_record


def tables_of(text):
    """Tables of rows of cells."""
    return [
        [re.findall(r"<t[hd][^>]*>\s*(.*?)\s*</t[hd]>", row) for row in table.split("<tr>")[1:]]
        for table in text.split("<table>")[1:]
    ]


def test_the_page_has_the_records_figures_and_asks_no_network():
    records = [
        made_record(run_dir="runs/1-a"),
        made_record(run_dir="runs/2-b", strategy__name="dp", performance__tokens_per_s=65536.0),
        made_record(run_dir="runs/3-c", work__seed=7, started_at="2027"),
        made_record(run_dir="runs/4-d", work__seed=7, status="failed", error="<b>&", step=5),
    ]
    sections = build_sections(group_by_work(records))
    text = html("Training runs", "4 runs: runs/<run>...", sections, "left out")
    assert "http" not in text
    newest, oldest = tables_of(text)
    assert [dict(zip(oldest[0], row, strict=True)) for row in oldest[1:]] == [
        {"run": run, "tokens/s": speed, "ms a step": "125.0", "MFU": "31.4%",
         "training loss": "3.062", "peak GPU memory": "12.00 GiB", "peak host memory": "5.00 GiB",
         "validation loss": "3.0000", "validation perplexity": "20.1", "status": "ok"}
        for run, speed in (("1 zero2", "131,072"), ("2 dp", "65,536"))
    ]  # fmt: skip
    assert newest[1][-1] == "failed 5/64"
    assert "&lt;b&gt;&amp;" in text
    plots = re.findall(r'<img alt="(.*?)" src="data:image/png;base64,', text)
    assert plots == ["loss-1", "throughput-1", "loss-2", "throughput-2"]


def test_a_comparison_over_seeds_has_all_its_tables(over_seeds):  # noqa: F811
    sections = build_sections([over_seeds])
    text = markdown("Side by side", "3 of 6 runs", sections)
    assert "tp failed: 16 heads <&> 3 processes" in text
    assert "![loss](loss.png)" in text
    page = html("Side by side", "", sections)
    assert text.count("\n| zero2") == len(tables_of(page)) == 4
    assert page.count("<img") == 3
    shown = terminal(sections[0])
    assert max(map(len, shown.splitlines())) <= 80
    assert "120,000 ± 28,284" in shown


@pytest.mark.parametrize("width", [80, 200])
def test_a_table_fits_the_terminal(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    mesh = {"pp": 2, "dp_replicate": 1, "dp_shard": 1, "tp": 2}
    pipeline = {"schedule": "1f1b", "num_microbatches": 8, "ideal_bubble": 0.1}
    records = [
        made_record(mesh=mesh, pipeline=pipeline, run_dir="runs/1-a"),
        made_record(status="interrupted", step=50, run_dir="runs/2-b", error="x " * 200),
    ]
    (section,) = build_sections(group_by_work(records))
    text = terminal(section)
    assert max(map(len, text.splitlines())) <= width
    assert ("MFU" in text) == (width == 200)
    assert "interrupted 50/64" in text
