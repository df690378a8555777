"""The page of --html, read back by a parser."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from distributed_training.records.compare import group_by_work
from distributed_training.records.page import build_page
from distributed_training.records.report import main
from tests.records.test_report import write_run
from tests.support import made_record

VOID = {"meta"}


class Page(HTMLParser):
    """Rows of every table, figures, ids, and whatever could ask a network."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tables, self.figures, self.ids, self.links = [], [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values[name] for name in ("src", "href", "xlink:href") if name in values]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "svg":
            self.figures.append(values["aria-label"])
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data.strip()


@pytest.fixture
def works():
    records = [
        made_record(run_dir="runs/1-a"),
        made_record(run_dir="runs/2-b", strategy__name="dp", performance__tokens_per_s=65536.0),
        made_record(run_dir="runs/3-c", work__seed=7, started_at="2027"),
        made_record(run_dir="runs/4-d", work__seed=7, status="failed", error="<b>&", step=5),
    ]
    return group_by_work(records)


def test_the_page_has_the_records_figures_and_asks_no_network(works):
    text = build_page("4 runs: runs/<run>...", works, "")
    page = Page(text)
    assert page.open == ["html"]
    assert [link for link in page.links if not link.startswith("#")] == []
    assert "http" not in text.replace("http://www.w3.org/", "")
    assert len(page.ids) == len(set(page.ids))
    assert {link[1:] for link in page.links} <= set(page.ids)
    newest, oldest = page.tables
    assert [dict(zip(oldest[0], row, strict=True)) for row in oldest[1:]] == [
        {"run": run, "strategy": name, "tokens/s": speed, "MFU": "31.4%", "loss": "3.062",
         "peak GPU memory": "12.00 GiB", "peak host memory": "5.00 GiB", "perplexity": "20.1",
         "status": "ok"}
        for run, name, speed in (("1", "zero2", "131,072"), ("2", "dp", "65,536"))
    ]  # fmt: skip
    assert newest[-1][-1] == "ok"
    assert newest[1][-1] == "failed 5/64"
    assert "&lt;b&gt;&amp;" in text
    assert page.figures == ["loss", "throughput", "memory"] * 2


def test_figures_are_drawn_in_the_colour_of_the_text_and_show_the_numbers(works):
    text = build_page("", works[1:], "")
    loss, speed, _ = (
        ET.fromstring("<svg" + part.partition("</svg>")[0] + "</svg>")
        for part in text.split("<svg")[1:]
    )
    words = [
        "".join(node.itertext()).strip() for node in speed.iter("{http://www.w3.org/2000/svg}text")
    ]
    assert {"131,072", "65,536", "zero2", "dp"} <= set(words)
    assert "currentColor" in text
    assert "#010203" not in text
    lines = [node.get("d") for node in loss.iter("{http://www.w3.org/2000/svg}path")]
    assert len({line for line in lines if line and line.count("L") == 1}) > 1


def test_the_command_writes_one_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path / "runs" / "a")
    assert main([run, "--html", "page.html"]) == 0
    assert capsys.readouterr().out.endswith("wrote page.html\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "runs"]
    assert "131,072" in (tmp_path / "page.html").read_text()
