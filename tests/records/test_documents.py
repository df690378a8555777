"""The documents keep what they say: figures equal the records, links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distributed_training.records.report import main
from distributed_training.settings.config import KEYS
from distributed_training.settings.files import ROOT
from distributed_training.settings.strategies import list_strategies

DOCUMENTS = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part.startswith(".") or part == "runs" for part in path.relative_to(ROOT).parts)
)


@pytest.mark.parametrize(
    "name", ["README.md", "TRAINING_RESULTS.md", "strategies/LAWS.md", "results/PREDICTIONS.md"]
)
def test_figures_equal_their_records(name):
    assert main(["--check", str(ROOT / name)]) == 0


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if not target.startswith(("http", "#")):
            file = path.parent / target.split("#")[0]
            assert file.exists(), f"{path.name} links to {target}"


def test_the_readme_has_every_key_and_strategy():
    text = (ROOT / "README.md").read_text()
    assert [key for key in KEYS if f"`{key}`" not in text] == []
    assert [name for name in list_strategies() if f"`{name}`" not in text] == []


@pytest.mark.parametrize("config", sorted(ROOT.glob("strategies/*/config.json")))
def test_a_strategy_folder_is_whole(config):
    folder = Path(config).parent
    assert (folder / "README.md").is_file()
    assert (folder / "run.sh").stat().st_mode & 0o111
