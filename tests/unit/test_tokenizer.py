import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from distributed_training.corpus import read_embedded
from distributed_training.sizes import SIZES
from distributed_training.tokenizer import EMBEDDED_DIR, END_OF_TEXT, Tokenizer
from tests.unit.conftest import refused

GPT2_DIR = Path("/work/shared/data/gpt2-tokenizer")
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


@pytest.mark.parametrize("text", SAMPLES)
def test_shipped_tokenizer_loses_nothing(text, tokenizer):
    (ids,) = tokenizer.encode_batch([text])
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids.tolist()) == text


@settings(max_examples=200, deadline=None)
@given(texts=st.lists(st.text(max_size=40), min_size=1, max_size=4))
def test_any_text_comes_back(texts, tokenizer):
    batch = tokenizer.encode_batch(texts)
    assert [tokenizer.decode(ids.tolist()) for ids in batch] == texts
    assert all((ids < tokenizer.num_tokens).all() for ids in batch)
    assert all(tokenizer.eos_id not in ids for ids in batch)


@pytest.mark.parametrize("folder", [EMBEDDED_DIR, GPT2_DIR], ids=["shipped", "gpt2"])
def test_ids_equal_those_of_transformers(folder):
    if not folder.is_dir():
        pytest.skip(f"no {folder} here")
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    texts = [*SAMPLES, *(text[:2000] for text in read_embedded()[:20])]
    for text, ids in zip(texts, ours.encode_batch(texts), strict=True):
        assert ids.tolist() == theirs(text)["input_ids"]
    assert ours.eos_id == theirs.eos_token_id
    assert ours.num_tokens == len(theirs)


def test_gpt2s_ids():
    if not GPT2_DIR.is_dir():
        pytest.skip(f"no {GPT2_DIR} here")
    tokenizer = Tokenizer(GPT2_DIR)
    assert tokenizer.encode_batch(["Hello world"])[0].tolist() == [15496, 995]
    assert (tokenizer.num_tokens, tokenizer.eos_id) == (50257, 50256)


def test_shipped_vocabulary_is_the_tiny_models(tokenizer):
    assert tokenizer.num_tokens == SIZES["gpt2-tiny"].vocab_size == 2048


def test_shipped_tokenizer_shortens_the_embedded_corpus(tokenizer):
    text = read_embedded()[0]
    assert len(tokenizer.encode_batch([text])[0]) < len(text.encode()) / 2


def test_decoding_leaves_end_of_text_out(tokenizer):
    ids = tokenizer.encode_batch(["one"])[0].tolist()
    assert tokenizer.decode([*ids, tokenizer.eos_id, *ids]) == "oneone"


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


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt"])
def test_missing_file_is_named(name, tmp_path):
    shutil.copytree(EMBEDDED_DIR, tmp_path / "copy")
    (tmp_path / "copy" / name).unlink()
    with refused(f"copy has no {name}", "vocab.json and merges.txt", "auto"):
        Tokenizer(tmp_path / "copy")


@pytest.mark.parametrize(
    ("vocabulary", "words"),
    [
        ("{", ("cannot be read",)),
        ("[]", ("cannot be read",)),
        ('{"a": 0}', (f"has no {END_OF_TEXT} token",)),
    ],
)
def test_unreadable_vocabulary(vocabulary, words, tmp_path):
    (tmp_path / "vocab.json").write_text(vocabulary)
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with refused(str(tmp_path), *words):
        Tokenizer(tmp_path)


def test_unreadable_merges(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps({END_OF_TEXT: 0, "a": 1}))
    (tmp_path / "merges.txt").write_text("x y\n")
    with refused(str(tmp_path), "cannot be read"):
        Tokenizer(tmp_path)


def test_half_of_a_surrogate_pair_is_explained(tokenizer):
    """A .jsonl file may hold "\\ud800": json.loads makes a string of it that is no text."""
    with refused("ud800"):
        tokenizer.encode_batch(["a\ud800b"])


@pytest.mark.parametrize("index", ["0", 0.5, -1, None, True, [0]])
def test_vocabulary_without_numbers(index, tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps({END_OF_TEXT: index}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with refused(str(tmp_path), "cannot be read"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a": ' + "1" * 5000 + "}", '{"a": 1e400}'])
def test_vocabulary_that_python_gives_up_on(content, tmp_path):
    (tmp_path / "vocab.json").write_text(content)
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with refused(str(tmp_path), "cannot be read"):
        Tokenizer(tmp_path)
