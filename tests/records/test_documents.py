"""The documents keep what they say: figures equal the records, links lead somewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from distributed_training.data.corpus import read_prose
from distributed_training.records.figures import keep_figures
from distributed_training.records.record import load_record
from distributed_training.records.report import main
from distributed_training.settings.config import KEYS
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import ROOT
from distributed_training.settings.strategies import list_strategies

DOCUMENTS = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part.startswith(".") or part == "runs" for part in path.relative_to(ROOT).parts)
)


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "TRAINING_RESULTS.md",
        "strategies/README.md",
        "strategies/LAWS.md",
        "results/PREDICTIONS.md",
    ],
)
def test_figures_equal_their_records(name):
    assert main(["--check", str(ROOT / name)]) == 0


def test_the_strategies_pages_begin_with_their_drawing():
    pages = sorted(ROOT.glob("strategies/*/README.md"))
    assert main(["--check", *map(str, pages)]) == 0
    for page in pages:
        name = json.loads(page.with_name("config.json").read_text())["name"]
        assert f'drawing("{name}")' in page.read_text().partition("\n## ")[0]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if not target.startswith(("http", "#")):
            file = path.parent / target.split("#")[0]
            assert file.exists(), f"{path.name} links to {target}"


def test_documents_have_every_key_and_strategy():
    text = (ROOT / "REAL_MODELS_GUIDE.md").read_text()
    assert [key for key in KEYS if f"- `{key}=" not in text] == []
    text = (ROOT / "README.md").read_text()
    assert [name for name in list_strategies() if f"`{name}`" not in text] == []


def test_the_readme_shows_words_that_the_preset_words_wrote():
    record = load_record(ROOT / "results/records/cpu-words/dp-gpt2-tiny-x2.json")
    preset = json.loads((ROOT / "configs/presets/words.json").read_text())
    del preset["_comment"]
    assert {name: record.config_requested[name] for name in preset} == preset
    known = set(re.findall(r"[a-z]+", "".join(read_prose()).lower()))
    before, after = str(record.sample_before), (record.model_extra or {})["sample"]
    said, babbled = (set(re.findall(r"[a-z]+", text.lower())) for text in (after, before))
    assert said <= known
    assert len(said) > 20, "not the same few words again and again"
    assert not babbled <= known
    readme = (ROOT / "README.md").read_text().replace("\n> ", " ")
    assert " ".join(after.split()) in " ".join(readme.split())


def test_a_figure_that_differs_from_its_records_is_told(tmp_path):
    records, folder = ROOT / "results" / "records", tmp_path / "plots"
    page = tmp_path / "page.md"
    page.write_text("![bubbles](plots/bubbles.svg)")
    keep_figures([page], records, folder, write=True)
    assert [file.name for file in folder.iterdir()] == ["bubbles.svg"]
    keep_figures([page], records, folder, write=False)
    (folder / "bubbles.svg").write_text("<svg/>")
    with pytest.raises(UserError, match="differs from its records"):
        keep_figures([page], records, folder, write=False)


@pytest.mark.parametrize("config", sorted(ROOT.glob("strategies/*/config.json")))
def test_a_strategy_folder_is_whole(config):
    folder = Path(config).parent
    assert (folder / "README.md").is_file()
    assert (folder / "run.sh").stat().st_mode & 0o111
