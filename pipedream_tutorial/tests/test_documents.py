"""Pages and what they are about agree: links, tables, pictures. Commands: test_commands.py."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tutorial_pages as results
from pipedream.errors import UserError
from pipedream.schedules.catalogue import SCHEDULES
from pipedream.schedules.closed_forms import CLOSED_FORMS
from tutorial_pages import FOLDER, drawn_from, fill, load_records, pages, stale, tables
from tutorial_text import checked, makespan_error, points_error, render_page, title

PAGES = ["README.md", "QUICKSTART.md", "COMPARISON.md", "TEST_RESULTS.md"]
_FENCE = re.compile(r"^```(?P<kind>[^\n]*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)]+)\)")


def anchors(text: str) -> set[str]:
    """GitHub's anchors of a page's headings."""
    heads = re.findall(r"^#+ (.*)$", re.sub(_FENCE, "", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES)
def test_links_and_pictures_lead_somewhere(page: str) -> None:
    text = (FOLDER / page).read_text()
    seen = 0
    for link in _LINK.finditer(re.sub(_FENCE, "", text)):
        target, _, anchor = link["target"].partition("#")
        if target.startswith("https://"):
            continue
        path = FOLDER / target if target else FOLDER / page
        assert path.exists(), link[0]
        assert not anchor or anchor in anchors(path.read_text()), link[0]
        seen += 1
    assert seen >= 2


def test_every_picture_is_shown_and_every_folder_is_on_the_map() -> None:
    text = (FOLDER / "README.md").read_text()
    shown = text + (FOLDER / "lecture.ipynb").read_text()
    for picture in (FOLDER / "figures").iterdir():
        assert f"](figures/{picture.name})" in shown, picture.name
    section = text.partition("## What is in this folder")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)/` \|", section, re.M)
    folders = (file.parent.name for file in FOLDER.glob("pipedream/*/__init__.py"))
    assert sorted(rows) == sorted(folders)
    for file in re.findall(r"`(\w+/\w+\.py)`", section):
        assert (FOLDER / "pipedream" / file).is_file(), file
    for file in (*(FOLDER / "pipedream").glob("*.py"), *FOLDER.glob("*.py"), FOLDER / "run.sh"):
        assert f"`{file.name}`" in section or file.name == "__init__.py", file


@pytest.mark.parametrize("page", PAGES)
def test_prose_is_wrapped_and_plain(page: str) -> None:
    text = (FOLDER / page).read_text()
    for line in re.sub(_FENCE, "", text).splitlines():
        assert len(line) <= 100 or line.startswith(("|", "- command:", "  python")), line
        assert line.isascii(), line


def test_pages_and_pictures_are_those_of_the_records() -> None:
    assert stale(FOLDER) == []


def test_a_page_that_disagrees_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A digit in a page, a record that has changed, a picture that is gone: each is named."""
    for name in PAGES:
        shutil.copy(FOLDER / name, tmp_path)
    for name in ("records", "figures"):
        shutil.copytree(FOLDER / name, tmp_path / name)
    assert stale(tmp_path) == []
    page = tmp_path / "COMPARISON.md"
    page.write_text(page.read_text().replace("| ZeRO-1 | 2.31 |", "| ZeRO-1 | 2.32 |"))
    (tmp_path / "figures/zero_bubble.png").unlink()
    record = next((tmp_path / "records").glob("cpu-runtime*.json"))
    record.write_text(record.read_text().replace('"utilisation": 0.', '"utilisation": 0.1'))
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr("sys.argv", ["results", "--check"])
    with pytest.raises(SystemExit) as ended:
        results.main()
    assert ended.value.code == 1
    named = [
        "COMPARISON.md",
        "TEST_RESULTS.md",
        "figures/prediction.png",
        "figures/zero_bubble.png",
    ]
    error = capsys.readouterr().err
    assert error.startswith("error: not up to date: ")
    assert all(name in error for name in named)
    assert "figures/plan.png" not in error
    monkeypatch.setattr("sys.argv", ["results", "--write"])
    results.main()
    assert stale(tmp_path) == []
    assert drawn_from(tmp_path / "figures/prediction.png") != drawn_from(
        FOLDER / "figures/prediction.png"
    )


def test_results_say_what_the_records_say() -> None:
    records = load_records(FOLDER / "records")
    assert records
    text = pages(FOLDER)["TEST_RESULTS.md"]
    for name, record in records.items():
        assert f"`{name}`" in text
        for case in record["cases"]:
            measured, star = case["measured"], r" \*" * case["calibrated_on"]
            cell = f"| {measured['makespan_ms']:,.1f}{star}"
            if record["machine"]["gpus"]:
                cell += f", {100 * measured['utilisation']:.1f}% ({points_error(case):+.1f}) |"
            else:
                cell += f" ({makespan_error(case):+.1f}%) |"
            assert cell in text or f"Run again, with times from {again(record)}: `{name}`." in text
        cases = checked(record)
        assert len(cases) < len(record["cases"])
        worst = (
            max(abs(makespan_error(case)) for case in cases),
            max(abs(points_error(case)) for case in cases),
        )
        line = f"| {title(record)}, {len(cases)} | {worst[0]:.1f}% | {worst[1]:.1f} points |"
        assert line in text
        assert ("Emulated: " in text) or not record["emulated_ms"]["forward"]


def again(record: Mapping[str, Any]) -> str:
    return SCHEDULES[record["calibration"]["schedule"]].title


def test_a_gpu_record_is_shown_as_measured() -> None:
    """The CPU's records, and one made to look like GPUs' that misses the goal and is not exact."""
    records = {
        name: each for name, each in load_records(FOLDER / "records").items() if "h200" not in name
    }
    record = next(iter(records.values()))
    case = dict(next(case for case in record["cases"] if not case["calibrated_on"]))
    case["measured"] = case["measured"] | {"utilisation": 0.5, "peak_memory_mib": [2048.0, 20.0]}
    case["measured"] |= {"weights_equal": False, "peak_versions": [9, 9]}
    case["predicted"] = case["predicted"] | {"utilisation": 0.5391}
    alone = dict(case, predicted=None, schedule="zb-h1")
    gpu = record | {
        "machine": record["machine"] | {"device": "NVIDIA H200", "gpus": 4},
        "emulated_ms": {"forward": 0, "backward": 0},
        "cases": [case, alone],
    }
    study = results._load(FOLDER / "records/cpu-staleness.json")
    text = render_page({**records, "h200-p4.json": gpu}, study)
    assert "Real work: " in text
    assert "| 3.9 points | not met |" in text
    said = " ".join(text.split())
    assert "3 of 4 records are predicted within their goal; missed: 2 stages, NVIDIA H200, " in said
    assert "28 of 30 final weights compared with one process's are equal bit for bit" in said
    assert "28 of 29 predicted runs kept as many weight versions as simulated" in said
    assert "| 2.0 |" in text
    assert "| ZB-H1 |" in text


def test_the_readme_shows_four_gpus_once_they_are_measured(tmp_path: Path) -> None:
    """The CPU's record, made to look like one of GPUs with an order that was searched for."""
    shutil.copytree(FOLDER / "records", tmp_path / "records")
    record = results._load(FOLDER / "records/cpu-runtime-zero-bubble.json")
    first, *others = record["cases"]
    gpu = record | {
        "machine": record["machine"] | {"device": "NVIDIA H200, 139 GiB", "gpus": 4},
        "cases": [first, others[-2] | {"schedule": "search-4"}],
    }
    (tmp_path / "records/h200-p4-zero-bubble.json").write_text(json.dumps(gpu))
    lines = tables(tmp_path)["measured bubbles"]().splitlines()
    assert lines[0] == "| schedule | 4 H200s, 2 batches of m = 8, c = 0.042 F |"
    measured = f"1,173 ms, {100 * first['measured']['bubble']:.1f}% (13.3%)"
    assert lines[2] == rf"| ZB-H1 | {measured} \* |"
    assert lines[3].startswith("| Search, 4 held | 1,100 ms, ")
    text = render_page(
        load_records(tmp_path / "records"), results._load(FOLDER / "records/cpu-staleness.json")
    )
    assert "| Search, 4 held | 1,100.3, " in text


def test_tables_on_the_pages_are_known_and_all_are_used() -> None:
    used = [
        name
        for page in results.PAGES
        for name in re.findall(r"<!-- table: (.*?) -->", (FOLDER / page).read_text())
    ]
    assert set(used) == set(tables(FOLDER))
    with pytest.raises(UserError, match="no table 'idle tim'; did you mean 'idle time'"):
        fill("<!-- table: idle tim -->\n<!-- end -->", tables(FOLDER))


def test_the_tables_of_laws_have_every_schedule_once() -> None:
    titles = {entry.title: entry for entry in SCHEDULES.values()}
    for name, columns in (("idle time", 2), ("activations", 2), ("weight versions", 3)):
        lines = tables(FOLDER)[name]().splitlines()[2:]
        shown = [title for line in lines for title in line.split(" | ")[0].strip("| ").split("; ")]
        flushes = name != "weight versions"
        assert sorted(shown) == sorted(
            SCHEDULES[schedule].title
            for schedule in CLOSED_FORMS
            if flushes or titles[SCHEDULES[schedule].title].policy != "flush"
        )
        assert all(len(re.split(r"(?<!\\)\|", line)) == columns + 2 for line in lines)
    assert r"| GPipe; 1F1B with flush; Eager 1F1B | (p-1) (F+B) |" in tables(FOLDER)["idle time"]()


def test_a_record_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cpu-runtime.json").write_text('{"format": 99}')
    with pytest.raises(UserError, match=r"cpu-runtime.json is no record of format 1; make it anew"):
        load_records(tmp_path)
    (tmp_path / "cpu-runtime.json").write_text("{")
    with pytest.raises(UserError, match="is no JSON"):
        load_records(tmp_path)
