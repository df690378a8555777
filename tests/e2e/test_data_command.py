"""Test that the `data` command shows a run's training data."""

import json

import pytest
from transformers import AutoTokenizer

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
    result = heavy_pool().script(["data", *options, "--json", "--show", 9])
    assert_ok(result)
    found = json.loads(result.stdout)
    theirs = AutoTokenizer.from_pretrained(model)
    ids = [theirs.apply_chat_template(said)["input_ids"] for said in (SAID, SAID[:2], SAID[:2])]
    assert [sample["ids"] for sample in found["samples"]] == ids
    learned = []
    for sample in found["samples"]:
        pairs = zip(sample["ids"], sample["loss_mask"], strict=True)
        learned.append(theirs.decode([token for token, is_target in pairs if is_target]))
    first = "<none>\nA sequence <|end|><|end|>\n"
    assert learned == ["<none>\nAnother one<|end|>\n", first, first]
    counts = found["counts"]
    assert (counts["records"], counts["used"], counts["samples"]) == (3, 2, 3)
    assert sum(counts["left_out"].values()) == 1
    text = heavy_pool().script(["data", *options]).stdout
    assert f"<|turn|>assistant\n«{first}»" in text


def test_control_characters_in_texts_are_escaped(tokenizer):
    (ids,) = tokenizer.encode_texts(["a\x1b[2Jb\u200d\tc\n"])
    shown = _mark_targets(tokenizer, ids.tolist(), [True] * len(ids))
    assert shown == "«a\\x1b[2Jb\u200d\tc\n»"
