"""Test that a model card matches the run's record, and that the Hub accepts the card's front
matter."""

import pytest
from huggingface_hub import ModelCard

from distributed_training.checkpoint.export import CARD, write_card
from tests.support import made_record


@pytest.fixture
def card(tmp_path):
    def write(name="hf", **changes):
        folder = tmp_path / "runs" / "20260101-dp" / name
        folder.mkdir(parents=True, exist_ok=True)
        write_card(folder, made_record(**changes))
        return ModelCard.load(folder / CARD)

    return write


def test_front_matter_has_the_known_fields(card):
    always = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    assert card().data.to_dict() == {**always, "base_model": "openai-community/gpt2-medium"}
    mine = "/home/me/mine.txt"
    changes = {"config__model": "hub:/home/me/gemma2", "config__weights": "random"}
    own = card(config__dataset=mine, work__dataset=mine, **changes)
    assert own.data.to_dict() == always
    assert "| mine.txt " in own.text
    assert "/home/me" not in own.text, "paths are nobody's business"


def test_card_has_the_numbers_of_the_record(card):
    text = card().text
    for words in (
        "gpt2-medium trained on wikitext-2", "354,823,168 parameters",
        "The training data has 1,000 samples of 512 tokens.",
        "| 0 | 3.5000 | 33.12 |", "| 64 | 3.0000 |",
        "64 of 64 steps with 32 sequences", "`zero2` on 4 processes", "NVIDIA H200",
        "| seed | 42 |", 'from_pretrained("path/to/20260101-dp/hf")',
        "generate path/to/20260101-dp/hf",
    ):  # fmt: skip
        assert words in text, words


def test_card_of_the_best_weights_has_their_losses(card):
    best = {"step": 40, "loss": 2.5, "perplexity": 12.18}
    evaluations = [{"step": step, "loss": 3.0, "perplexity": 20.0} for step in (0, 20, 64)]
    changes = {"best": best, "evaluations": [*evaluations, best]}
    text = card("best", **changes).text
    assert "These are the weights after step 40, which had the lowest validation loss." in text
    rows = [line.split()[1] for line in text.splitlines() if line.startswith("| ")]
    assert [row for row in rows if row.isdecimal()] == ["0", "40"]
    assert "These are the weights after step 64." in card(**changes).text


def test_markup_in_names_is_escaped(card):
    name = "[click](evil) <b>`x`|y\x1b[2J.txt"
    text = card(config__dataset=name, work__dataset=name, config__weights="random").text
    assert "\x1b" not in text
    assert text.count(r"\[click\](evil) \<b\>\`x\`\|y\\x1b\[2J.txt") == 2
