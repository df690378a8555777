"""Test that the `data` command shows a run's training data."""

import re

import pytest

from distributed_training.tools.data import _mark_targets
from tests.conftest import assert_ok, heavy_pool
from tests.data.test_samples import jsonl
from tests.data.test_tokenizer import FORGETFUL, SAID, folder  # noqa: F401
from tests.support import edit_json, tiny_qwen2


@pytest.fixture(scope="module")
def model(folder):  # noqa: F811
    """Write a tiny model to `folder`, with a chat template that renders an answer differently if
    later turns follow. Return the folder."""
    tiny_qwen2().save_pretrained(folder)
    edit_json(folder / "tokenizer_config.json", chat_template=FORGETFUL)
    return folder


def test_each_answer_is_shown_once_in_its_context(model, tmp_path):
    rows = [{"messages": SAID}, {"messages": SAID[:1]}, {"messages": SAID[:2]}]
    jsonl(tmp_path, rows)
    options = ["--model", model, "--dataset", tmp_path / "a.jsonl", "--max_length", 200]
    result = heavy_pool().script(["data", *options, "--show", 9])
    assert_ok(result)
    samples = result.stdout.partition("--- sample 1")[2]
    learned = re.findall("«(.*?)»", samples, re.S)
    first = "<none>\nA sequence <|end|><|end|>\n"
    assert learned == ["<none>\nAnother one<|end|>\n", first, first]
    assert f"<|turn|>assistant\n«{first}»" in result.stdout
    assert "3 read, 2 used" in result.stdout


def test_control_characters_in_texts_are_escaped(tokenizer):
    (ids,) = tokenizer.encode_texts(["a\x1b[2Jb\u200d\tc\n"])
    shown = _mark_targets(tokenizer, ids.tolist(), [True] * len(ids))
    assert shown == "«a\\x1b[2Jb\u200d\tc\n»"
