"""Pages and what they are about agree: links, tables, pictures. Commands: test_commands.py."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from pipedream.errors import UserError

from results.lab.tutorial import pages as results
from results.lab.tutorial.pages import FOLDER, drawn_from, fill, load_records, stale, tables
from results.lab.tutorial.text import render_page

PAGES = ["README.md", "ADVANCED.md", "QUICKSTART.md", "COMPARISON.md", "TEST_RESULTS.md"]
_FENCE = re.compile(r"^```(?P<kind>[^\n]*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)]+)\)")


def without_blocks(page: str) -> str:
    return re.sub(_FENCE, "", (FOLDER / page).read_text())


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    heads = re.findall(r"^#+ (.*)$", re.sub(_FENCE, "", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere_and_prose_is_wrapped_and_plain(page: str) -> None:
    for link in _LINK.finditer(without_blocks(page)):
        target, _, anchor = link["target"].partition("#")
        if not target.startswith("https://"):
            path = FOLDER / target if target else FOLDER / page
            assert path.exists(), link[0]
            assert not anchor or anchor in anchors(path), link[0]
    for line in without_blocks(page).splitlines():
        assert len(line) <= 100 or line.startswith(("|", "![")), line
        assert line.isascii(), line


def test_every_picture_is_shown_and_every_folder_is_on_the_map() -> None:
    text = (FOLDER / "ADVANCED.md").read_text()
    shown = text + (FOLDER / "README.md").read_text() + (FOLDER / "lecture.ipynb").read_text()
    for picture in (FOLDER / "figures").iterdir():
        assert f"](figures/{picture.name})" in shown, picture.name
    section = text.partition("## What is in this folder")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)/` \|", section, re.M)
    folders = (file.parent.name for file in FOLDER.glob("pipedream/*/__init__.py"))
    assert sorted(rows) == sorted(folders)
    for file in (*(FOLDER / "pipedream").glob("[!_]*.py"), *FOLDER.glob("*.py")):
        assert f"`{file.name}`" in section, file


def test_the_first_part_is_read_in_an_hour() -> None:
    """Some 1,300 words beside blocks and tables, no table with more than four rows; all pages
    together 5,500 words."""
    text = without_blocks("README.md")
    rows = re.findall(r"(?:^\|.*\n)+", text, re.M)
    assert all(len(table.splitlines()) <= 2 + 4 for table in rows)
    prose = re.sub(r"(?m)^(\||<).*$", "", text)
    assert 1000 <= len(re.findall(r"\S*\w\S*", prose)) <= 1400
    all_words = [re.findall(r"\S*\w\S*", (FOLDER / page).read_text()) for page in PAGES]
    assert sum(map(len, all_words)) <= 5500


def test_pages_and_pictures_are_those_of_the_records() -> None:
    assert stale(FOLDER) == []


def test_a_page_that_disagrees_is_found_and_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A digit in a page, a record that has changed, a picture that is gone: each is named."""
    for name in PAGES:
        shutil.copy(FOLDER / name, tmp_path)
    for name in ("records", "figures"):
        shutil.copytree(FOLDER / name, tmp_path / name)
    page = tmp_path / "COMPARISON.md"
    page.write_text(page.read_text().replace("| ZeRO-1 | 2.31 |", "| ZeRO-1 | 2.32 |"))
    (tmp_path / "figures/zero_bubble.png").unlink()
    record = next((tmp_path / "records").glob("cpu-runtime*.json"))
    record.write_text(record.read_text().replace('"utilisation": 0.', '"utilisation": 0.1'))
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr("sys.argv", ["pages.py", "--check"])
    with pytest.raises(SystemExit) as ended:
        results.main()
    assert ended.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("error: not up to date: ")
    for name in ("COMPARISON.md", "TEST_RESULTS.md", "prediction.png", "zero_bubble.png"):
        assert name in error
    assert "figures/plan.png" not in error
    monkeypatch.setattr("sys.argv", ["pages.py", "--write"])
    results.main()
    assert stale(tmp_path) == []
    shown = drawn_from(tmp_path / "figures/prediction.png")
    assert shown != drawn_from(FOLDER / "figures/prediction.png")


def made_to_look_like_four_gpus(name: str, **changes: Any) -> dict[str, Any]:
    record = results._load(FOLDER / "records" / name)
    machine = record["machine"] | {"device": "NVIDIA H200, 139 GiB", "gpus": 4}
    return record | {"machine": machine, "emulated_ms": {"forward": 0, "backward": 0}} | changes


def test_a_gpu_record_that_misses_the_goal_and_is_not_exact_says_so() -> None:
    records = {
        name: each for name, each in load_records(FOLDER / "records").items() if "h200" not in name
    }
    record = next(iter(records.values()))
    case = dict(next(case for case in record["cases"] if not case["calibrated_on"]))
    case["measured"] = case["measured"] | {"utilisation": 0.5, "peak_memory_mib": [2048.0, 20.0]}
    case["measured"] |= {"weights_equal": False, "peak_versions": [9, 9]}
    case["predicted"] = case["predicted"] | {"utilisation": 0.5391}
    cases = [case, dict(case, predicted=None, schedule="search-4")]
    gpu = made_to_look_like_four_gpus(next(iter(records)), cases=cases, note="Odd, this one.")
    study = results._load(FOLDER / "records/cpu-staleness.json")
    text = " ".join(render_page({**records, "h200-p4.json": gpu}, study).split())
    for part in (
        "Real work: ",
        "| 3.9 points | not met |",
        "3 of 4 records are predicted within their goal; missed: 2 stages, NVIDIA H200, ",
        "28 of 30 final weights compared with one process's are equal bit for bit",
        "28 of 29 predicted runs kept as many weight versions as simulated",
        "| 2.0 |",
        "| Search, 4 held |",
        "Odd, this one.",
    ):
        assert part in text, part


def test_tables_on_the_pages_are_known_and_all_are_used() -> None:
    used = [
        name
        for page in results.PAGES
        for name in re.findall(r"<!-- table: (.*?) -->", (FOLDER / page).read_text())
    ]
    assert sorted(used) == sorted(tables(FOLDER))
    with pytest.raises(UserError, match="no table 'idle tim'; did you mean 'idle time'"):
        fill("<!-- table: idle tim -->\n<!-- end -->", tables(FOLDER))


@pytest.mark.parametrize(
    ("text", "said"), [('{"format": 99}', "no record of format 1; make it anew"), ("{", "no JSON")]
)
def test_a_record_of_another_format_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "cpu-runtime.json").write_text(text)
    with pytest.raises(UserError, match=said):
        load_records(tmp_path)
