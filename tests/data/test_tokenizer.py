import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from distributed_training.data.tokenizer import END_OF_TEXT, Tokenizer
from tests.support import refused

SAMPLES = [
    "",
    " ",
    "Hello world",
    "  two  spaces\n\nand\tlines\r\n",
    "def f(x: int) -> int:\n    return x ** 2  # it's 100% fine, isn't it?",
    "naïve café — “quotes” … ½ №5",
    "日本語 العربية עברית ไทย हिन्दी",
    "🙂👩‍👩‍👧 e\u0301 \u00a0\u2028\ufeff",
    "\x00\x01\x7f\x85",
    "don't WE'LL 123456 1e-5 a_b_c",
]


@settings(max_examples=100, deadline=None)
@given(texts=st.lists(st.text(max_size=40), min_size=1, max_size=4))
def test_any_text_comes_back(texts, tokenizer):
    batch = tokenizer.encode_batch([*texts, f"a{END_OF_TEXT}b"])  # a mention is not the token
    assert {ids.dtype for ids in batch} == {np.dtype(np.int32)}
    assert [tokenizer.decode(ids.tolist()) for ids in batch[:-1]] == texts
    assert all((ids < tokenizer.num_tokens).all() for ids in batch)
    assert all(tokenizer.eos_id not in ids for ids in batch)


def test_a_saved_folder_gives_the_same_ids_in_transformers(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "new" / "folder")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "new" / "folder")
    for text, ids in zip(SAMPLES, tokenizer.encode_batch(SAMPLES), strict=True):
        assert ids.tolist() == theirs(text)["input_ids"]
    assert (theirs.eos_token, theirs.eos_token_id) == (END_OF_TEXT, tokenizer.eos_id)
    assert tokenizer.num_tokens == len(theirs)


@pytest.mark.parametrize(
    ("vocabulary", "merges", "words"),
    [
        ("{}", None, "cannot be read; "),
        ("{", "", "set tokenizer to auto"),
        (json.dumps({END_OF_TEXT: 0, "a": 1}), "x y\n", "cannot be read"),
        ('{"a": 0}', "", f"has no {END_OF_TEXT} token"),
    ],
)
def test_unusable_files_are_refused(vocabulary, merges, words, tmp_path):
    (tmp_path / "vocab.json").write_text(vocabulary)
    if merges is not None:
        (tmp_path / "merges.txt").write_text("#version: 0.2\n" + merges)
    with refused(str(tmp_path), words):
        Tokenizer(tmp_path)
