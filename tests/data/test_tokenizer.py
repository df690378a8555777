import json
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from distributed_training.data.corpus import read_embedded
from distributed_training.data.tokenizer import EMBEDDED_DIR, END_OF_TEXT, Tokenizer
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


@settings(max_examples=200, deadline=None)
@given(texts=st.lists(st.text(max_size=40), min_size=1, max_size=4))
def test_any_text_comes_back(texts, tokenizer):
    batch = tokenizer.encode_batch(texts)
    assert {ids.dtype for ids in batch} == {np.dtype(np.int32)}
    assert [tokenizer.decode(ids.tolist()) for ids in batch] == texts
    assert all((ids < tokenizer.num_tokens).all() for ids in batch)
    assert all(tokenizer.eos_id not in ids for ids in batch)


def test_ids_equal_those_of_transformers(tokenizer):
    ours, theirs = tokenizer, AutoTokenizer.from_pretrained(EMBEDDED_DIR)
    texts = [*SAMPLES, *(text[:2000] for text in read_embedded()[:20])]
    for text, ids in zip(texts, ours.encode_batch(texts), strict=True):
        assert ids.tolist() == theirs(text)["input_ids"]
    assert ours.eos_id == theirs.eos_token_id
    assert ours.num_tokens == len(theirs)


def test_the_mark_in_a_text_is_not_the_token(tokenizer):
    """A text that mentions the mark must not end there."""
    (ids,) = tokenizer.encode_batch([f"a{END_OF_TEXT}b"])
    assert tokenizer.eos_id not in ids


def test_saved_folder_opens_in_transformers(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "new" / "folder")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "new" / "folder")
    text = SAMPLES[4]
    assert theirs(text)["input_ids"] == tokenizer.encode_batch([text])[0].tolist()
    assert theirs.eos_token == END_OF_TEXT
    assert theirs.eos_token_id == tokenizer.eos_id


def test_fingerprint_is_of_both_files(tokenizer, tmp_path):
    shutil.copytree(EMBEDDED_DIR, tmp_path / "copy")
    copy = Tokenizer(tmp_path / "copy")
    assert copy.fingerprint == tokenizer.fingerprint
    prints = {tokenizer.fingerprint}
    for name in ("vocab.json", "merges.txt"):
        (copy.folder / name).write_text((copy.folder / name).read_text() + "\n")
        prints.add(copy.fingerprint)
    assert len(prints) == 3


def test_missing_file_is_named(tmp_path):
    shutil.copytree(EMBEDDED_DIR, tmp_path / "copy")
    (tmp_path / "copy" / "merges.txt").unlink()
    with refused("copy cannot be read", "vocab.json and merges.txt", "auto"):
        Tokenizer(tmp_path / "copy")


@pytest.mark.parametrize(
    ("vocabulary", "merges", "words"),
    [
        ("{", "", "cannot be read"),
        (json.dumps({END_OF_TEXT: 0, "a": 1}), "x y\n", "cannot be read"),
        ('{"a": 0}', "", f"has no {END_OF_TEXT} token"),
    ],
)
def test_unusable_files_are_refused(vocabulary, merges, words, tmp_path):
    (tmp_path / "vocab.json").write_text(vocabulary)
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + merges)
    with refused(str(tmp_path), words):
        Tokenizer(tmp_path)
