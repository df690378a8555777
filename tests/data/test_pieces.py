"""Test that tokenizing text in pieces gives the same token IDs as tokenizing it whole."""

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from distributed_training.data import pieces
from distributed_training.data.files import read_text
from distributed_training.data.pieces import cut_lines, cut_text
from distributed_training.data.tokenizer import Tokenizer
from tests.data.test_tokenizer import save_tokenizer, train_bpe
from tests.data.theirs import TheirTokenizer
from tests.support import refused

AWKWARD = st.sampled_from("ab1é字。.,'\"-_ \n\t\r\x0b\x1c\x85\u00a0\u2028\u3000\u180e\u200b🙂s")


def blocks_of(text, sizes):
    """Split `text` into blocks whose sizes cycle through `sizes`."""
    blocks, start = [], 0
    while start < len(text):
        blocks.append(text[start : start + sizes[len(blocks) % len(sizes)]])
        start += len(blocks[-1])
    return blocks


@pytest.fixture(scope="module")
def small_pieces():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "_MIN_CHARACTERS", 3)
        yield


def split_by(pattern):
    """Return a pre-tokenizer that splits text by `pattern` and then maps the parts to bytes, as in
    many tokenizer.json files."""
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])


LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KINDS = {
    "gpt-2": (pre_tokenizers.ByteLevel(add_prefix_space=False), True),
    "llama-3": (split_by(LLAMA_3), True),
    "qwen-2": (split_by(LLAMA_3.replace("{1,3}", "")), True),
    "spaced": (pre_tokenizers.ByteLevel(add_prefix_space=True), False),
    "other": (split_by(r"\S+\s*"), False),
    "metaspace": (pre_tokenizers.Metaspace(), False),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request, tmp_path_factory):
    """Return our tokenizer and the transformers tokenizer from the same folder. Their merges span
    spaces and line breaks unless the pre-tokenizer splits the text there."""
    before, can_cut = KINDS[request.param]
    draw = random.Random(0)
    texts = ["".join(draw.choices("ab1é字。.,'\"-_ \n\t\r s", k=200)) for _ in range(200)]
    built = train_bpe(texts, ["<|end|>", "?"], 900, before, unk_token="?")
    folder = save_tokenizer(tmp_path_factory.mktemp("kind"), built, "<|end|>")
    ours = Tokenizer(folder)
    assert ours.can_cut == can_cut
    return ours, TheirTokenizer(folder)


@settings(max_examples=100, deadline=None)
@given(
    text=st.text(st.one_of(AWKWARD, st.characters(exclude_categories=["Cs"])), max_size=80),
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=3),
)
def test_ids_of_pieces_equal_transformers_for_the_whole_text(text, sizes, kind, small_pieces):
    ours, theirs = kind
    text += "x<|end|>y"
    text_pieces = list(cut_text(blocks_of(text, sizes), can_cut=ours.can_cut))
    assert "".join(piece.text for piece in text_pieces) == text
    assert text_pieces == list(cut_text([text], can_cut=ours.can_cut))
    assert [piece.ends for piece in text_pieces] == [False] * (len(text_pieces) - 1) + [True]
    ids = np.concatenate([row for row, _ in ours.encode_pieces(text_pieces)])
    assert ids.tolist() == theirs(text)["input_ids"]


def test_a_text_that_cannot_be_split_is_kept_whole_or_refused(monkeypatch):
    monkeypatch.setattr(pieces, "_MIN_CHARACTERS", 3)
    monkeypatch.setattr(pieces, "_MAX_UNCUT", 30)
    for text, can_cut in (("x" * 25, True), ("x yy zz x yy zz x", False)):
        assert [piece.text for piece in cut_text(blocks_of(text, [7]), can_cut=can_cut)] == [text]
        with refused("cannot be tokenized"):
            list(cut_text(blocks_of(2 * text, [7]), can_cut=can_cut))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=st.text(AWKWARD, max_size=60))
def test_lines_of_pieces_equal_the_lines_of_the_whole_text(text, tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(text.encode())
    for blocks in (read_text(file, by_line=True), [text]):  # from disk and from memory
        lines = [piece.text for piece in cut_lines(blocks)]
        expected_text = text
        if blocks != [text]:
            expected_text = text.replace("\r\n", "\n").replace("\r", "\n")
        assert lines == [line for line in expected_text.split("\n") if line.strip()]
