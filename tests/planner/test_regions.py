"""Test that tp refuses what it would compute wrongly in models that run transformers' code."""

import pytest

from tests.models.hub_folders import make_folder
from tests.planner.helpers import plan_for
from tests.support import refused


@pytest.mark.parametrize(
    ("kind", "shape", "values", "words"),
    [
        ("phi", {}, {"dropout": 0.1}, ["dropout", "sums over ranks"]),
        ("qwen3_5_text", {}, {"batch_size": 1, "micro_batch_size": 1}, ["whole samples"]),
        ("gemma", {"num_key_value_heads": 1}, {}, ["the 1 key/value heads"]),
        ("gemma4_text", {}, {}, ["share keys and values"]),
        ("falcon", {}, {}, ["declares no layers"]),
    ],
)
def test_refused_by_a_property(kind, shape, values, words, tmp_path):
    model = str(make_folder(kind, tmp_path / "model", **shape))
    given = {
        "strategy": "tp",
        "max_length": 32,
        "dataset": "embedded",
        "tokenizer": "embedded",
    } | values
    with refused(*words):
        plan_for(tmp_path, model=model, **{"max_length": 32} | given)
