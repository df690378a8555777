"""Test that the links, tables and pictures on the pages are correct. test_commands.py tests the
commands."""

import json
import re
from pathlib import Path

import pipedream
import pytest
from pipedream.__main__ import CONFIG, RULES
from pipedream.simulate.comparison import measure

from results.lab.tutorial import website
from results.lab.tutorial.pages import FOLDER, outdated_files

PAGES = ["README.md", "ADVANCED.md", "QUICKSTART.md", "COMPARISON.md", "TEST_RESULTS.md"]
_FENCE = re.compile(r"^```(?P<kind>[^\n]*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)]+)\)")


def without_blocks(page: str) -> str:
    return re.sub(_FENCE, "", (FOLDER / page).read_text())


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub creates for a page's headings."""
    heads = re.findall(r"^#+ (.*)$", re.sub(_FENCE, "", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES)
def test_links_resolve_and_prose_is_wrapped_and_plain(page: str) -> None:
    for link in _LINK.finditer(without_blocks(page)):
        target, _, anchor = link["target"].partition("#")
        if not target.startswith("https://"):
            path = FOLDER / target if target else FOLDER / page
            assert path.exists(), link[0]
            if anchor and path.suffix != ".html":  # test_explorer_engine.py tests these
                assert anchor in anchors(path), link[0]
    for line in without_blocks(page).splitlines():
        assert len(line) <= 100 or line.startswith(("|", "![", "[![")), line
        assert line.isascii(), line


def test_website_links_resolve_and_the_notebook_clones_the_repository_in_colab(
    tmp_path: Path,
) -> None:
    website.build_site(tmp_path / "site", "owner/name")
    site = tmp_path / "site"
    for page in site.glob("*.html"):
        assert 'src="http' not in page.read_text(), page.name  # the image would be missing offline
        for target in re.findall(r'(?:href|src)="([^"#]+)', page.read_text()):
            if not target.startswith(("https://", "data:")):
                assert (site / target).is_file() or (site / target).is_dir(), (page.name, target)
    index = (site / "index.html").read_text()
    assert "colab.research.google.com/github/owner/name/blob/gh-pages/lecture.ipynb" in index
    assert 'href="explorer.html#schedule=zb-v&amp;other=1f1b"' in index
    assert 'id="7-pipelines-in-production"' in index
    book = json.loads((site / "lecture.ipynb").read_text())
    assert "git clone --quiet --depth 1 https://github.com/owner/name" in book["cells"][0]["source"]


def test_every_picture_is_shown_and_every_folder_and_script_is_named() -> None:
    pages = ("README.md", "ADVANCED.md", "TEST_RESULTS.md", "lecture.ipynb")
    shown = "".join((FOLDER / page).read_text() for page in pages)
    for picture in (FOLDER / "figures").iterdir():
        assert f"](figures/{picture.name})" in shown, picture.name
    rows = re.findall(r"(?m)^(\w+)/ ", str(pipedream.__doc__))
    folders = (file.parent.name for file in FOLDER.glob("pipedream/*/__init__.py"))
    assert sorted(rows) == sorted(folders)
    for file in FOLDER.glob("*.py"):
        assert file.name in shown, file


def test_pages_and_pictures_match_the_records() -> None:
    assert outdated_files(FOLDER) == []


EACH = "forward={0} input_gradient={0} weight_gradient={0}"
ANSWERS = {  # answers on the pages: words -> (schedule, settings)
    "a batch takes 32 x 4 + 14 = 142": ("zb-h1", "num_stages=8 num_microbatches=32 forward=2"),
    "two chunks and 50.25": ("interleaved", "num_microbatches=16 chunks=4"),
    "If c = 0, 16 microbatches take 52.5": ("interleaved", "num_microbatches=16"),
    "59.5": ("interleaved", "num_microbatches=16 communication=1/2"),
    "59.5 and 75.75": ("interleaved", "num_microbatches=16 chunks=4 communication=1/2"),
    "V-Half takes 26.5": ("v-half", ""),
    "DualPipeV takes 27": ("dualpipe-v", ""),
    "DualPipeV takes 24.5": ("dualpipe-v", "overlap_saving=1/2"),
    "`schedule=search memory=3` takes 31": ("search", "memory=3"),
    "33.28 + 3.06 = 36.34": ("zb-h1", "input_gradient=1.02 weight_gradient=2.14"),
    "DualPipeV then takes 25.33": ("dualpipe-v", "overlap_saving=1/3"),
    "quarter (it takes 25.75": ("dualpipe-v", "overlap_saving=1/4"),
    "the shortest order with `memory=7` takes 30": ("search", "memory=7 communication=1"),
    "35 x 3 + 2 (34 - 8) = 157": ("1f1b", "num_microbatches=32 communication=1"),
    "A batch then takes 35": ("1f1b", "communication=1/8"),
    "with m = 8, 32": ("1f1b", f"num_microbatches=16 communication=1/8 {EACH.format('1/2')}"),
    "below), and 37.625": ("1f1b", f"num_microbatches=64 communication=1/8 {EACH.format('1/8')}"),
}


@pytest.mark.parametrize("words", ANSWERS)
def test_answers_on_the_page_match_the_simulator(words: str) -> None:
    pages = "".join((FOLDER / page).read_text() for page in ("ADVANCED.md", "README.md"))
    assert words in " ".join(pages.split())
    name, changes = ANSWERS[words]
    config = dict(CONFIG)
    for change in changes.split():
        key, value = change.split("=")
        config[key] = RULES[key].check(key, value)
    found = float(measure(name, config).batch.makespan)
    assert float(re.findall(r"\d+(?:\.\d+)?", words)[-1]) == pytest.approx(found, abs=0.005)
