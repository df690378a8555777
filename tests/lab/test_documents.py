"""Test that the documents are up to date: their figures match the records, and their links have
targets."""

import json
import re
from pathlib import Path

from distributed_training.settings.files import ROOT
from distributed_training.settings.strategies import list_strategies
from results.lab.documents import main
from results.lab.pages import tables
from results.lab.pages.sentences import fill
from results.lab.pages.tables import published_table
from tests.support import record_values, refused

DOCUMENTS = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part.startswith(".") or part == "runs" for part in path.relative_to(ROOT).parts)
)


def test_figures_equal_their_records():
    assert main(["--check"]) == 0


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub creates for a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_resolve():
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
            if target.startswith("http"):
                continue
            name, _, anchor = target.partition("#")
            page = path.parent / name if name else path
            assert page.exists(), f"{path} links to {target}"
            if anchor and page.suffix == ".md":
                assert anchor in anchors(page), f"{path} links to {target}"


def test_readme_names_every_strategy():
    text = (ROOT / "README.md").read_text()
    assert [name for name in list_strategies() if f"`{name}`" not in text] == []


def test_a_figure_without_a_value_is_refused_and_an_outdated_one_is_filled_in():
    at = 'at("text.json", "num_cpus")'
    formulas = {"1": f"..., {at}"}
    text = "On 24 GB, it took 7 s.\n\n<!-- figures 1 -->\n\n    10 GB of code\n"
    with refused("2 figures (24 GB, 7 s) have 0 values"):
        fill(text, formulas)
    held = text.replace("s.\n\n", "s.\n")
    assert fill(held, formulas) == held.replace("7 s", "8 s")


VERSIONS = {"torch": "2.14.1+cpu"}
BEGIN, END = '<!-- [[[cog cog.outl(published_table("h200-x4")) ]]] -->\n', "<!-- [[[end]]] -->\n"
IMPORTS = f"<!-- [[[cog\nfrom results.lab.pages.tables import *\n]]] -->\n{END}"


def test_tables_are_filled_in_and_outdated_tables_are_detected(tmp_path, monkeypatch):
    record = tmp_path / "h200-x4" / "a.json"
    record.parent.mkdir()
    record.write_text(json.dumps(record_values(versions=VERSIONS)))
    monkeypatch.setattr(tables, "RECORDS_DIR", tmp_path)
    document = tmp_path / "RESULTS.md"
    empty = f"# Results\n{IMPORTS}\nText before.\n\n{BEGIN}{END}\nText after.\n"
    document.write_text(empty)
    with refused(f"documents.py {document}"):
        main(["--check", str(document)])
    assert main([str(document)]) == 0
    text = document.read_text()
    assert text == empty.replace(BEGIN, BEGIN + published_table("h200-x4") + "\n")
    document.write_text(text.replace("Text after", "Other text"))
    assert main(["--check", str(document)]) == 0
    record.write_text(json.dumps(record_values(versions=VERSIONS, performance__tokens_per_s=1)))
    with refused(str(document)):
        main(["--check", str(document)])
